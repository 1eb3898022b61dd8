"""A forward pass of our own for Llama-like models: packed projections, cached attention, few kernels.

Pre-norm blocks with RMS norm, rotary positions, grouped-query attention and a SwiGLU MLP; optional biases
on q, k and v (Qwen2) and optional norms of each query and key head (Qwen3). The weights are a private
copy, taken at `refresh`: an update of the policy shows only after the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepladder.engines.local.cache import SlotCache
from stepladder.engines.local.facts import FUSABLE
from stepladder.engines.local.graphs import CudaRecorder, DecodeGraphs
from stepladder.engines.local.layout import PassLayout
from stepladder.engines.local.packing import Linear, effective_weight, linear_class, why_not_linear
from stepladder.engines.local.spans import Heads, attend, spans
from stepladder.engines.weights import WeightHash

ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the length
FILL = 4  # on a CPU a pass has a multiple of this many tokens: 4 rows beat 1


@dataclass(slots=True)
class Layer:
    """One block's weights. `head_norm` is [heads + kv_heads, head_dim] where the model has such norms."""

    input_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


def why_not_fused(model: Any) -> str | None:
    """Why this model cannot take the fused path, as far as its structure tells; None where it can."""
    config = model.config
    if config.model_type not in FUSABLE:
        return f"{config.model_type} is not one of {', '.join(sorted(FUSABLE))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "some of its layers use a sliding window"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPES:
        return f"its rotary positions are of type {rope}"
    reasons = (why_not_linear(module) for module in _linears(model))
    return next((reason for reason in reasons if reason is not None), None)


def _linears(model: Any) -> Iterator[Any]:
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield from (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
    yield model.lm_head


class FusedForward:
    """See the module's docstring. `refresh` must run before the first pass."""

    shares = True
    ragged = True

    def __init__(self, model: Any, store: SlotCache, max_context: int, dtype: torch.dtype) -> None:
        self.model, self.store, self.dtype = model, store, dtype
        self.device = store.kv.device
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, store.geometry.kv_heads
        self.head_dim, self.eps = store.geometry.head_dim, config.rms_norm_eps
        self.eps_tensor = torch.tensor(self.eps, device=self.device)
        self.shape = Heads(self.kv_heads, self.heads // self.kv_heads, dtype, self.device)
        self._linear = linear_class(self.device, dtype)
        self.cos, self.sin = self._rotary(max_context)
        self.layers: list[Layer] = []
        self._taken: list[Tensor] = []
        self.hash = ""
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda":
            self.graphs = DecodeGraphs(self, CudaRecorder(self.device))

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Tables [length, 1, head_dim] from the model's own module; sines signed for a half-swap."""
        positions = torch.arange(length)[None]
        module = self.model.model.rotary_emb
        cos, sin = module(
            torch.zeros(1, 1, 1, device=module.inv_freq.device), positions.to(module.inv_freq.device)
        )
        sign = torch.ones(self.head_dim, device=sin.device)
        sign[: self.head_dim // 2] = -1.0
        cos, sin = cos[0, :, None], (sin * sign)[0, :, None]
        return cos.to(self.device, self.dtype).contiguous(), sin.to(self.device, self.dtype).contiguous()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy, cast, merge and pack the policy's present weights."""
        seen = WeightHash()
        before = iter(self._taken)
        self._taken = []

        def take(tensor: Tensor, *, copy: bool = True) -> Tensor:
            held = next(before, None)
            if held is None:
                taken = tensor.detach().to(self.device, self.dtype, copy=copy)
            else:
                taken = held.copy_(tensor.detach())
            if self.graphs is not None:  # they read the weights where they lay when they were recorded
                self._taken.append(taken)
            seen.add(taken)
            return taken

        def pack(*modules: Any) -> Linear:
            parts = [effective_weight(module) for module in modules]
            weight = torch.cat([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0]
            weight = take(weight, copy=not self._linear.copies and len(parts) == 1)
            biases = [bias for _, bias in parts if bias is not None]
            return self._linear(weight, take(torch.cat(biases)) if biases else None)

        body = self.model.model
        self.layers = []
        for block in body.layers:
            a, m = block.self_attn, block.mlp
            head_norm = None
            if hasattr(a, "q_norm"):
                norms = [a.q_norm.weight.expand(self.heads, -1), a.k_norm.weight.expand(self.kv_heads, -1)]
                head_norm = take(torch.cat(norms))
            self.layers.append(
                Layer(
                    take(block.input_layernorm.weight),
                    pack(a.q_proj, a.k_proj, a.v_proj),
                    head_norm,
                    pack(a.o_proj),
                    take(block.post_attention_layernorm.weight),
                    pack(m.gate_proj),
                    pack(m.up_proj),
                    pack(m.down_proj),
                )
            )
        self.embedding, self.norm = take(body.embed_tokens.weight), take(body.norm.weight)
        self.head = pack(self.model.lm_head)
        self.hash = seen.digest()

    def reserve(self, rows: int, length: int) -> None:
        self.store.reserve(rows, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.store.copy(source, target, length)

    def drop(self, slot: int) -> None:
        """A slot is reused as it is."""

    def clear(self) -> None:
        self.store.clear()

    def rest(self) -> None:
        if self.graphs is None:  # recorded graphs point into the cache
            self.store.free()

    def free(self) -> None:
        self.store.free()
        self.layers, self._taken = [], []
        if self.graphs is not None:
            self.graphs.clear()

    def run(
        self, new: Sequence[Sequence[int]], starts: Sequence[int], slot: int, *, every: bool = False
    ) -> Tensor:
        if self.graphs is not None and not every and slot == 0 and all(len(tokens) == 1 for tokens in new):
            return self.graphs.run([tokens[0] for tokens in new], starts)
        flat = [token for tokens in new for token in tokens]
        layout = self.layout([len(tokens) for tokens in new], starts, slot)
        ids = torch.tensor(flat + [0] * (layout.filled - len(flat)), device=self.device)
        wanted = None if every or len(new) == len(flat) else layout.last
        return self.compute(ids, layout, wanted)[: len(flat) if every else len(new)]

    def compute(self, ids: Tensor, layout: PassLayout, wanted: Tensor | None) -> Tensor:
        """Logits [filled, V], or of the tokens `wanted` alone; nothing but tensor operations."""
        x = F.embedding(ids, self.embedding)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, x, self.store.kv[index], layout, wanted if index == last else None)
        return self.head(self._rms(x, self.norm))

    def layout(self, lengths: Sequence[int], starts: Sequence[int], slot: int) -> PassLayout:
        """Of rows from `slot` on with so many new tokens each, after those that their caches hold."""
        count = torch.tensor(lengths, device=self.device)
        end = count.cumsum(0)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), count)
        begin = torch.tensor(starts, device=self.device)
        positions = torch.arange(len(row), device=self.device) + (begin - end + count)[row]
        filled = self._filled(len(row))
        at = F.pad(positions, (0, filled - len(row)))
        k, t, rows = self.kv_heads, self.store.length, self.store.rows
        head = torch.arange(2 * k, device=self.device)
        base = (head // k) * rows * k + head % k  # keys, then values: [2, rows, kv_heads, T]
        where = (base + (slot + row)[:, None] * k) * t + positions[:, None]
        return PassLayout(
            filled,
            self.cos[at],
            self.sin[at],
            where,
            F.pad(end - 1, (0, self._filled(len(lengths)) - len(lengths))),
            tuple(spans(lengths, starts, slot, t, self.shape, by_bucket=self.graphs is not None)),
        )

    def _filled(self, count: int) -> int:
        """A length that oneDNN need not prepare anew each time: up to a sixteenth more than `count`."""
        if self.device.type != "cpu":
            return count
        step = max(FILL, 1 << max(0, count.bit_length() - 5))
        return -(-count // step) * step

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        wide = x.to(torch.float32, copy=True)  # made once: fresh memory costs more than the arithmetic
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(torch.addcmul(self.eps_tensor, norm, norm, value=1 / x.shape[-1]))
        return wide.mul_(scale).mul_(weight).to(x.dtype)

    def _layer(
        self, layer: Layer, x: Tensor, kv: Tensor, layout: PassLayout, wanted: Tensor | None
    ) -> Tensor:
        """The block's output, of the tokens `wanted` alone where those are given."""
        h, k, d = self.heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(self._rms(x, layer.input_norm)).view(-1, h + 2 * k, d)
        qk = qkv[:, : h + k]
        if layer.head_norm is not None:
            qk.copy_(F.rms_norm(qk, (d,), None, self.eps) * layer.head_norm)
        torch.addcmul(qk * layout.cos, qk.roll(d // 2, -1), layout.sin, out=qk)
        real = layout.where.shape[0]
        kv.view(-1, d).index_put_((layout.where,), qkv[:real, h:])
        # all attend, wanted or not: rows of a span are computed side by side
        parts = [attend(qkv[:, :h], kv, span) for span in layout.spans]
        if real < layout.filled:
            parts.append(qkv.new_zeros(layout.filled - real, h * d))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if wanted is not None:
            mixed, x = mixed[wanted], x[wanted]
        x = layer.out.add(mixed, x)
        inner = self._rms(x, layer.mlp_norm)
        return layer.down.add(layer.up.mul(inner, layer.gate.silu(inner)), x)
