"""Decoding and training on one GPU, beside the card's measured roofline and transformers on the same card.

    bench/gpu.sh                                  # at most 8 minutes
    python bench/gpu.py --device cpu --shapes tiny --sizes 2 --rows 4 --length 32 --out /tmp   # its logic

The weights are random, so that nothing has to be fetched; speed does not depend on them. First the engine's
log-probabilities must be those of transformers' forward pass. What does not fit into `--minutes` is left out
and said so; what was measured is in --out/gpu.json after each number.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from decode_sides import Ours, Transformers, Work
from measuring import Target, parser, start
from roofline import Cost, Roof, measure_roof, wait

from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.rungs.supervised import sft_update
from stepladder.types import TrainingSample

# hidden, layers, heads, key heads, width of the MLP, vocabulary: SmolLM2-135M, and Llama 3.2 1B and 3B
SHAPES = {
    "tiny": (64, 2, 4, 2, 176, 512),
    "135m": (576, 30, 9, 3, 1536, 49152),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "3b": (3072, 28, 24, 8, 8192, 128256),
}


def make_model(shape: str, dtype: torch.dtype, device: str) -> Any:
    """Random weights in a Llama of this shape, embeddings tied."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, inner, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    model.generation_config = GenerationConfig()
    return model.eval()


def ids(vocabulary: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


class Card:
    """One shape on one device."""

    def __init__(self, shape: str, options: argparse.Namespace, roof: Roof) -> None:
        self.shape, self.options, self.roof = shape, options, roof
        self.dtype = getattr(torch, options.dtype)
        self.vocabulary = SHAPES[shape][5]

    def median(self, measure: Callable[[], float]) -> float:
        return statistics.median(measure() for _ in range(self.options.repeats))

    def agreement(self) -> float:
        """Mean |difference| in nats of a token's log-probability, over the deviation of all of them."""
        model = make_model(self.shape, self.dtype, self.options.device)
        side = Ours(model)
        row = ids(self.vocabulary, 1, 128)[0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row], device=self.options.device)).logits[0, :-1].float()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(row[1:], device=logits.device)[:, None])[:, 0]
        got = torch.tensor(side.engine.token_logprobs(row), device=logits.device)
        gap = float((got - wanted).abs().mean() / logits.log_softmax(-1).std())
        side.close()
        return gap

    def decode(self, size: int) -> dict[str, float]:
        """Tokens a second with prefill, and the shares of the bound of prefill and of a steady step."""
        o = self.options
        model = make_model(self.shape, self.dtype, o.device)
        cost = Cost.of(model, self.dtype)
        prompts = ids(self.vocabulary, size, o.prompt, seed=size)
        one, many = Work(prompts, 1), Work(prompts, 1 + o.new)
        side = Ours(model, max_rows=max(128, size), cache_bytes=8 << 30)
        side.run(many)  # kernels are chosen in the first
        both = self.median(lambda: side.run(many)[0])
        parts = [side.prefill_and_steps(prompts, o.new) for _ in range(o.repeats + 1)][1:]
        first = statistics.median(seconds for seconds, _ in parts)
        steps = statistics.median(seconds for _, seconds in parts)
        side.close()
        peer = Transformers(model)
        peer.run(one)
        theirs = self.median(lambda: peer.run(many)[0])
        step = steps / o.new
        bound = self.roof.seconds(*cost.decode_step(size, o.prompt + o.new / 2))
        return {
            "ours": many.tokens / both,
            "transformers": many.tokens / theirs,
            "step_ms": step * 1e3,
            "bound_ms": bound * 1e3,
            "decode": bound / step,
            "prefill": self.roof.seconds(*cost.prefill(size, o.prompt)) / first,
        }

    def train(self) -> dict[str, float]:
        """Tokens a second of whole optimiser steps; shares of the matrix peak. Ours, then a plain loop."""
        o = self.options
        rows = ids(self.vocabulary, o.rows, o.length, seed=1)
        policy = Policy(make_model(self.shape, self.dtype, o.device), tiny_tokenizer())
        cost = Cost.of(policy.lm, self.dtype)
        optimizer = MasterOptimizer(policy.trainable())
        mask, turns = (False, *[True] * (o.length - 1)), (-1, *[0] * (o.length - 1))
        samples = [
            TrainingSample(tuple(r), mask, (0.0,) * o.length, str(i), turns, str(i))
            for i, r in enumerate(rows)
        ]

        def ours() -> float:
            wait(o.device)
            began = time.perf_counter()
            sft_update(policy, optimizer, samples, learning_rate=1e-6, token_budget=o.budget)
            wait(o.device)
            return time.perf_counter() - began

        ours()
        seconds = self.median(ours)
        optimizer.close()
        del policy, optimizer
        free()
        theirs = self.plain_loop(rows)
        flops = cost.train(o.rows * o.length, o.rows * (o.length - 1))
        return {
            "ours": o.rows * o.length / seconds,
            "transformers": o.rows * o.length / theirs,
            "mfu": flops / seconds / self.roof.peak,
            "mfu_transformers": flops / theirs / self.roof.peak,
        }

    def plain_loop(self, rows: Sequence[Sequence[int]]) -> float:
        """Float32 weights under autocast, AdamW, micro-batches of the same number of tokens."""
        o = self.options
        model = make_model(self.shape, torch.float32, o.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        batch = torch.tensor(rows, device=o.device)
        parts = batch.split(max(1, o.budget // o.length))

        def once() -> float:
            wait(o.device)
            began = time.perf_counter()
            for part in parts:
                with torch.autocast(o.device.split(":")[0], dtype=torch.bfloat16):
                    loss = model(input_ids=part, labels=part).loss
                (loss * len(part) / len(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wait(o.device)
            return time.perf_counter() - began

        once()
        return self.median(once)


def free() -> None:
    """What the last part held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> list[Target]:
    kept = start(options, "gpu", leave_out=("minutes",))
    if options.device.startswith("cuda"):
        kept.about = f"{torch.cuda.get_device_name(options.device)}; {kept.about}"
    end = time.monotonic() + options.minutes * 60
    skipped: list[str] = []
    dtype = getattr(torch, options.dtype)
    rates = kept.once("roof", lambda: asdict(measure_roof(options.device, dtype, side=options.side)))
    roof = Roof(**rates)
    lines = [
        f"Measured: reading {roof.bandwidth / 1e9:.0f} GB/s, matrix products {roof.peak / 1e12:.1f} TFLOP/s "
        f"in {options.dtype}. Prompts of {options.prompt} tokens, {options.new} new ones; training on "
        f"{options.rows} rows of {options.length} tokens.",
        "",
        "| model | what | ours tokens/s | transformers | ratio | share of the bound | prefill's |",
        "|---|---|---|---|---|---|---|",
    ]
    targets: list[Target] = []
    for shape in options.shapes:
        card = Card(shape, options, roof)
        jobs = {"agreement": card.agreement, "train": card.train}
        jobs |= {f"decode {n}": lambda n=n, c=card: c.decode(n) for n in options.sizes}  # type: ignore[misc]
        for name, job in jobs.items():
            key = f"{shape}/{name}"
            if key not in kept.values and time.monotonic() > end:
                skipped.append(key)
                continue
            report(shape, name, kept.once(key, job), lines, targets)
            free()
    if skipped:
        lines += ["", f"Left out, {options.minutes:g} minutes were over: {', '.join(skipped)}."]
    kept.page("One GPU: the roofline and transformers", lines, targets)
    return targets


def report(shape: str, name: str, got: Any, lines: list[str], targets: list[Target]) -> None:
    if name == "agreement":
        targets.append(Target(f"{shape}: log-probabilities off, of their spread", got, 0.05, below=True))
        return
    share = got["mfu"] if name == "train" else got["decode"]
    prefill = "" if name == "train" else f"{got['prefill']:.2f}"
    ratio = got["ours"] / got["transformers"]
    lines.append(
        f"| {shape} | {name} | {got['ours']:.0f} | {got['transformers']:.0f} | {ratio:.2f} | {share:.2f} "
        f"| {prefill} |"
    )
    targets.append(Target(f"{shape}, {name}: share of the bound", share, None, 0.6))
    targets.append(Target(f"{shape}, {name}: transformers", ratio, 1.0))


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "1b"])
    made.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 64, 256])
    made.add_argument("--prompt", type=int, default=128)
    made.add_argument("--new", type=int, default=64)
    made.add_argument("--rows", type=int, default=32, help="of a training step")
    made.add_argument("--length", type=int, default=512, help="tokens of a row")
    made.add_argument("--budget", type=int, default=4096, help="tokens a micro-batch, ours and theirs")
    made.add_argument("--side", type=int, default=0, help="of the matrices of the roofline")
    made.add_argument("--minutes", type=float, default=7.0, help="after which nothing new is begun")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
