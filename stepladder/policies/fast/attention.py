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
from stepladder.policies.fast.row_attention import row_attention
from stepladder.policies.fast.tiles import Tiling, tiling

NAME = "stepladder"


@dataclass(frozen=True, slots=True)
class Layout:
    """Who sees whom in a packed row: on a CPU as tiles, elsewhere as blocks with masks."""

    prefix: int = 0
    blocks: tuple[tuple[int, int, Tensor | None], ...] = ()
    tiling: Tiling | None = None

    @classmethod
    def of(cls, packed: PackedBatch, device: torch.device, length: int) -> Layout:
        """For a row of `length` tokens, of which those after the batch's own are filling: a block apart."""
        if device.type == "cpu":
            return cls(tiling=tiling(packed.blocks, packed.prefix, length))
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
    """Each token sees its own prefix. Returns [1, N, heads, d]."""
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.tiling is not None:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return row_attention(q, k, v, layout.tiling, scale)[None], None
    return _by_blocks(query, key, value, layout, scale).transpose(1, 2), None


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Each block sees the shared prefix and, by its mask, its own ancestors: [1, heads, N, d]."""
    prefix, parts = layout.prefix, []
    if prefix:
        parts.append(_sdpa(query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix], None, scale))
    for start, end, mask in layout.blocks:
        k, v = key[:, :, start:end], value[:, :, start:end]
        if prefix:
            k = torch.cat([key[:, :, :prefix], k], dim=2)
            v = torch.cat([value[:, :, :prefix], v], dim=2)
        parts.append(_sdpa(query[:, :, start:end], k, v, mask, scale))
    return torch.cat(parts, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
