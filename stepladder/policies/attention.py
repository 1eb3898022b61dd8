"""Attention over a packed row, whose layout comes with each call (never through global state).

Registered with transformers as the attention implementation "stepladder": with a `layout` it computes
block by block, without one it is transformers' own SDPA path, so a model can use both side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stepladder.data.batching import PackedBatch

NAME = "stepladder"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the blocks of a packed row lie, with their masks on the model's device."""

    prefix: int
    blocks: tuple[tuple[int, int, Tensor | None], ...]

    @classmethod
    def of(cls, packed: PackedBatch, device: torch.device, length: int) -> Layout:
        """For a row of `length` tokens, of which those after the batch's own are filling: a block apart."""
        blocks = [
            (b.start, b.end, None if b.mask is None else torch.from_numpy(b.mask).to(device))
            for b in packed.blocks
        ]
        filling = length - packed.num_tokens
        if filling:
            nothing = None
            if packed.prefix:  # a block's mask speaks of the shared prefix too
                own = torch.ones(filling, filling, dtype=torch.bool, device=device).tril_()
                nothing = torch.cat([own.new_zeros(filling, packed.prefix), own], dim=1)
            blocks.append((packed.num_tokens, length, nothing))
        return cls(packed.prefix, tuple(blocks))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, N, d]
    key: Tensor,  # [1, kv_heads, N, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Each block sees the shared prefix and, by its mask, its own ancestors. Returns [1, N, heads, d]."""
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    prefix, parts = layout.prefix, []
    if prefix:
        parts.append(_attend(query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix], None, scaling))
    for start, end, mask in layout.blocks:
        k, v = key[:, :, start:end], value[:, :, start:end]
        if prefix:
            k = torch.cat([key[:, :, :prefix], k], dim=2)
            v = torch.cat([value[:, :, :prefix], v], dim=2)
        parts.append(_attend(query[:, :, start:end], k, v, mask, scaling))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:  # DeepSeek's values are shorter than its keys
        out: Tensor = _CpuAttention.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
        return out
    return _sdpa(q, k, v, mask, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


class _CpuAttention(torch.autograd.Function):
    """SDPA whose backward pass is matrix products, some queries at a time.

    torch's own takes three times as long on a CPU at the lengths of a packed block, and wants the keys of
    grouped heads repeated. Scores and their gradients are float32, as in it. Keeps q, k and v alone.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return _sdpa(q, k, v, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        return (*_attention_gradients(q, k, v, mask, ctx.scale, grad), None, None)


SCORE_BYTES = 16 * 2**20  # of float32 scores at a time in the backward pass


def _attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes of q [1, heads, n, d] and k, v [1, kv_heads, m, d]."""
    _, heads, n, d = q.shape
    kv, m, group = k.shape[1], k.shape[2], heads // k.shape[1]
    kind, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    queries, slopes = (t.reshape(kv, group, n, d) for t in (q, grad))  # heads of one key side by side
    keys, values = k[0], v[0]
    wide_keys, wide_values = keys.to(wide).transpose(1, 2), values.to(wide).transpose(1, 2)
    to_q = torch.empty(kv, group, n, d, dtype=kind)
    to_k, to_v = torch.zeros(kv, m, d, dtype=wide), torch.zeros(kv, m, d, dtype=wide)
    rows = max(1, SCORE_BYTES // (4 * heads * m))
    for start in range(0, n, rows):
        end = min(start + rows, n)
        seen = m if mask is not None else end  # without a mask it is causal, and n = m
        part = queries[:, :, start:end].reshape(kv, -1, d)
        slope = slopes[:, :, start:end].reshape(kv, -1, d)
        scores = torch.bmm(part.to(wide), wide_keys[:, :, :seen]).mul_(scale)
        hidden = _hidden(mask, start, end, seen)
        scores.view(kv * group, end - start, seen).masked_fill_(hidden, float("-inf"))
        p = torch.softmax(scores, -1)
        to_v[:, :seen] += torch.bmm(p.to(kind).transpose(1, 2), slope)
        # softmax: ds = p·(dp − Σ p·dp)
        to_p = torch.bmm(slope.to(wide), wide_values[:, :, :seen])
        along = torch.linalg.vecdot(p, to_p).unsqueeze(-1)
        to_scores = to_p.sub_(along).mul_(p).mul_(scale).to(kind)
        to_q[:, :, start:end] = torch.bmm(to_scores, keys[:, :seen]).view(kv, group, end - start, d)
        to_k[:, :seen] += torch.bmm(to_scores.transpose(1, 2), part)
    return to_q.view(q.shape), to_k.to(kind)[None], to_v.to(kind)[None]


def _hidden(mask: Tensor | None, start: int, end: int, seen: int) -> Tensor:
    """[end − start, seen]: what the queries from `start` to `end` may not see."""
    if mask is not None:
        return ~mask[start:end]
    return torch.ones(end - start, seen, dtype=torch.bool).triu_(start + 1)


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
