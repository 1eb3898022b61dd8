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

from stepladder.engines.cache import SlotCache, bucketed
from stepladder.engines.packing import Linear, effective_weight, linear_class, why_not_linear
from stepladder.engines.weights import WeightHash

FUSABLE = frozenset({"llama", "qwen2", "qwen3"})
ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # tables that do not depend on the length


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

    def __init__(self, model: Any, store: SlotCache, max_context: int, dtype: torch.dtype) -> None:
        self.model, self.store, self.dtype = model, store, dtype
        self.device = store.kv.device
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, store.geometry.kv_heads
        self.head_dim, self.eps = store.geometry.head_dim, config.rms_norm_eps
        self._linear = linear_class(self.device, dtype)
        self.row_multiple = (
            4 if self.device.type == "cpu" else 1
        )  # fewer shapes for oneDNN to prepare; 4 rows beat 1
        self.cos, self.sin = self._rotary(max_context)
        self.layers: list[Layer] = []
        self.hash = ""

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

        def take(tensor: Tensor, *, copy: bool = True) -> Tensor:
            taken = tensor.detach().to(self.device, self.dtype, copy=copy)
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

    def free(self) -> None:
        self.store.free()
        self.layers = []

    def run(self, ids: Tensor, starts: Sequence[int], slot: int, last: Sequence[int] | None) -> Tensor:
        b, q = ids.shape
        start = torch.tensor(starts, device=self.device)
        positions = start[:, None] + torch.arange(q, device=self.device)
        read = min(bucketed(max(starts) + q), self.store.length)
        at = positions.clamp(max=self.cos.shape[0] - 1)  # padding may lie beyond the tables
        cos, sin = self.cos[at].view(b * q, 1, -1), self.sin[at].view(b * q, 1, -1)
        mask = torch.arange(read, device=self.device) <= positions[:, :, None]
        where = self._where(slot, positions)
        x = F.embedding(ids.to(self.device), self.embedding).view(b * q, -1)
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, x, cos, sin, self.store.kv[index], where, slot, mask)
        if last is not None and q > 1:
            x = x.view(b, q, -1)[torch.arange(b, device=self.device), torch.tensor(last, device=self.device)]
        logits = self.head(self._rms(x, self.norm))
        return logits if last is not None else logits.view(b, q, -1)

    def _where(self, slot: int, positions: Tensor) -> Tensor:
        """Flat indices into a layer's cache [2 · rows · kv_heads · T]: [b · q, 2 · kv_heads]."""
        k, t, rows = self.kv_heads, self.store.length, self.store.rows
        row = slot + torch.arange(positions.shape[0], device=self.device)[:, None, None]
        head = torch.arange(2 * k, device=self.device)
        base = (head // k) * rows * k + head % k
        return ((base + row * k) * t + positions[:, :, None]).view(-1, 2 * k)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        where: Tensor,
        slot: int,
        mask: Tensor,
    ) -> Tensor:
        h, k, d = self.heads, self.kv_heads, self.head_dim
        qkv = layer.qkv(self._rms(x, layer.input_norm)).view(-1, h + 2 * k, d)
        qk = qkv[:, : h + k]
        if layer.head_norm is not None:
            qk = F.rms_norm(qk, (d,), None, self.eps) * layer.head_norm
        swapped = torch.cat([qk[..., d // 2 :], qk[..., : d // 2]], dim=-1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        kv.view(-1, d)[where] = torch.cat([qk[:, h:], qkv[:, h + k :]], dim=1)
        out = self._attend(qk[:, :h], kv[:, slot : slot + mask.shape[0], :, : mask.shape[2]], mask)
        x = layer.out.add(out, x)
        inner = self._rms(x, layer.mlp_norm)
        return layer.down.add(layer.up.mul(inner, layer.gate.silu(inner)), x)

    def _attend(self, query: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """query [b · q, heads, d] over kv [2, b, kv_heads, T, d] with mask [b, q, T]: [b · q, heads · d].

        The heads of a group are laid side by side as queries of their key head, so that keys and values
        are never repeated.
        """
        b, q, t = mask.shape
        k, g, d = self.kv_heads, self.heads // self.kv_heads, self.head_dim
        query = query.reshape(b, q, k, g, d)
        if q == 1:
            scores = torch.matmul(query.view(b, k, g, d) * d**-0.5, kv[0].transpose(-1, -2))
            weights = scores.masked_fill_(~mask[:, :, None], float("-inf")).softmax(-1)
            return torch.matmul(weights, kv[1]).view(b, -1)
        query = query.permute(0, 2, 3, 1, 4).reshape(b, k, g * q, d)
        mask = mask[:, None, None].expand(b, 1, g, q, t).reshape(b, 1, g * q, t)
        out = F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask)
        return out.view(b, k, g, q, d).permute(0, 3, 1, 2, 4).reshape(b * q, -1)
