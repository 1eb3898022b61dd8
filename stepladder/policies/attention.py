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
    def of(cls, packed: PackedBatch, device: torch.device) -> Layout:
        blocks = tuple(
            (b.start, b.end, None if b.mask is None else torch.from_numpy(b.mask).to(device))
            for b in packed.blocks
        )
        return cls(packed.prefix, blocks)


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
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key = key.repeat_interleave(repeat, dim=1)
        value = value.repeat_interleave(repeat, dim=1)
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
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
