"""How fast this machine could be at most: measured bandwidth and matrix products, and what a model needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Roof:
    """bandwidth: bytes/s of a large read, or of a copy (read and written) where that is faster.

    peak: FLOP/s of the best large matrix product in one type.
    """

    bandwidth: float
    peak: float

    def seconds(self, bytes_read: float, flops: float) -> float:
        """The least time in which so much can be read and computed, both at once."""
        return max(bytes_read / self.bandwidth, flops / self.peak)


def measure_roof(device: str, dtype: torch.dtype, *, side: int = 0) -> Roof:
    """Best of a few, in this process, with its threads. `side`: of the largest matrices, by default what fits
    the device; where it is given all is measured small and short, for a test of the logic."""
    gpu = device.startswith("cuda")
    seconds, megabytes = (0.02, 1) if side else (0.6, 4096 if gpu else 512)
    side = side or (8192 if gpu else 2048)
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    size = source.numel() * 4
    bandwidth = size / _best(lambda: source.sum(), device, seconds)
    bandwidth = max(bandwidth, 2 * size / _best(lambda: target.copy_(source), device, seconds))
    del source, target
    peak = 0.0
    for n in (side // 2, side):
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        best = _best(lambda a=left, b=right: a @ b, device, seconds)  # type: ignore[misc]
        peak = max(peak, 2 * n**3 / best)
    return Roof(bandwidth, peak)


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _best(work: Callable[[], Tensor], device: str, seconds: float) -> float:
    work()
    wait(device)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True, slots=True)
class Cost:
    """What a causal LM needs: weights of the layers and of the head, and what one token of context costs.

    `attention`: multiply-adds of one query token with one position of the context, over all layers.
    `cache`: bytes that a position's keys and values take.
    """

    layers: int
    head: int
    attention: int
    cache: int
    itemsize: int

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> Cost:
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        apart = {id(embedding), id(head)}
        body = sum(p.numel() for p in model.parameters() if id(p) not in apart)
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            body,
            head.numel(),
            2 * heads * width * config.num_hidden_layers,
            2 * kv * width * config.num_hidden_layers * dtype.itemsize,
            dtype.itemsize,
        )

    def decode_step(self, rows: int, context: float) -> tuple[float, float]:
        """(bytes read, FLOPs) of one token for each of `rows` sequences that hold `context` tokens each."""
        weights = (self.layers + self.head) * self.itemsize
        flops = 2 * (self.layers + self.head + self.attention * context)
        return weights + rows * context * self.cache, rows * flops

    def prefill(self, rows: int, length: int) -> tuple[float, float]:
        """(bytes read, FLOPs) of `rows` prompts of `length` tokens, logits after the last token of each."""
        weights = (self.layers + self.head) * self.itemsize
        body = rows * length * 2 * (self.layers + self.attention * length / 2)
        return weights + rows * length * self.cache, body + rows * 2 * self.head

    def train(self, tokens: float, scored: float) -> float:
        """FLOPs of forward and backward: 6 a weight and token, the head only where a token is scored."""
        return 6.0 * (self.layers * tokens + self.head * scored)
