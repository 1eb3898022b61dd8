"""Attention over a packed row on a CPU, forward and backward as matrix products over batches of tiles.

torch's own kernel computes all pairs of a block and wants the keys of grouped heads repeated; its backward
pass takes twice as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepladder.policies.fast.tiles import Tiles, Tiling


def row_attention(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the tokens that each query sees, [N, heads, d'].

    q is [N, heads, d], k [N, kv_heads, d] and v [N, kv_heads, d']. Gradients flow to all three.
    """
    out: Tensor = _RowAttention.apply(q, k, v, tiling, scale)  # type: ignore[no-untyped-call]
    return out


class _RowAttention(torch.autograd.Function):
    """Scores and their gradients are float32 at least, and the products with p and its gradient are in the
    inputs' type, as in torch's. Keeps q, k and v alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, scale: float) -> Tensor:
        parts = []
        for tiles in tiling.batches:
            p = _probabilities(_queries(q, tiles, k.shape[1]), _columns(k, tiles), tiles, scale)
            parts.append(_rows(torch.bmm(p.to(q.dtype), _columns(v, tiles)), tiles))
        ctx.save_for_backward(q, k, v)
        ctx.tiling, ctx.scale = tiling, scale
        return _in_order(parts, tiling).view(*q.shape[:2], v.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        return (*_gradients(q, k, v, ctx.tiling, ctx.scale, grad), None, None)


def _queries(rows: Tensor, tiles: Tiles, kv: int, *, spare_zero: bool = False) -> Tensor:
    """[count · kv_heads, Q · group, d] of [N, heads, d]: side by side those that meet one key."""
    found = rows.index_select(0, tiles.queries)
    if spare_zero and len(tiles.spare):
        found.index_fill_(0, tiles.spare, 0.0)
    found = found.view(tiles.count, -1, kv, rows.shape[1] // kv * rows.shape[2])
    return found.transpose(1, 2).reshape(tiles.count * kv, -1, rows.shape[2])


def _rows(values: Tensor, tiles: Tiles) -> Tensor:
    """[count · Q, heads · d], the reverse of `_queries`."""
    kv, q = len(values) // tiles.count, len(tiles.queries) // tiles.count
    return values.view(tiles.count, kv, q, -1).transpose(1, 2).reshape(tiles.count * q, -1)


def _in_order(parts: list[Tensor], tiling: Tiling) -> Tensor:
    """The rows of all batches as the row has them, [N, ...]."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).index_select(0, tiling.places)


def _columns(rows: Tensor, tiles: Tiles) -> Tensor:
    """[count · kv_heads, C, d] of [N, kv_heads, d]."""
    found = rows[tiles.low : tiles.high]
    if tiles.columns is not None:
        found = found.index_select(0, tiles.columns)
    found = found.view(tiles.count, -1, *rows.shape[1:])
    return found.transpose(1, 2).reshape(-1, found.shape[1], rows.shape[2])


def _add_columns(total: Tensor, values: Tensor, tiles: Tiles) -> None:
    """values [count · kv_heads, C, d] onto total [N, kv_heads, d]: many columns may be one token's."""
    met = total[tiles.low : tiles.high]
    by_tile = values.view(tiles.count, -1, *values.shape[1:]).transpose(1, 2)  # [count, C, kv_heads, d]
    if tiles.columns is None:
        met += by_tile[0]
        return
    rows = torch.empty(by_tile.shape, dtype=total.dtype).copy_(by_tile).view(len(tiles.columns), -1)
    met += torch.ops.aten.embedding_dense_backward(rows, tiles.columns, len(met), -1, False).view(met.shape)


def _probabilities(asked: Tensor, keys: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """[count · kv_heads, Q · group, C]."""
    wide = torch.promote_types(asked.dtype, torch.float32)
    scores = torch.bmm(asked.to(wide) * scale, keys.to(wide).transpose(1, 2))
    if tiles.hidden.shape[-1]:
        count, _, q, _, _ = tiles.hidden.shape
        scores.view(count, -1, q, scores.shape[1] // q, scores.shape[2])[..., tiles.first :] += tiles.hidden
    return torch.softmax(scores, -1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes of q, k and v."""
    kv, kind, wide = k.shape[1], q.dtype, torch.promote_types(q.dtype, torch.float32)
    to_k, to_v = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    to_q = []
    for tiles in tiling.batches:
        asked, keys, values = _queries(q, tiles, kv), _columns(k, tiles), _columns(v, tiles)
        slope = _queries(grad, tiles, kv, spare_zero=True)  # a copy must not count twice
        p = _probabilities(asked, keys, tiles, scale)
        _add_columns(to_v, torch.bmm(p.to(kind).transpose(1, 2), slope), tiles)
        to_p = torch.bmm(slope.to(wide), values.to(wide).transpose(1, 2))
        # softmax: ds = p·(dp − Σ p·dp)
        to_scores = torch.ops.aten._softmax_backward_data(to_p, p, -1, wide).to(kind)
        to_q.append(_rows(torch.bmm(to_scores, keys), tiles))
        _add_columns(to_k, torch.bmm(to_scores.transpose(1, 2), asked), tiles)
    to_q_rows = _in_order(to_q, tiling).view(q.shape)
    return to_q_rows.mul_(scale), to_k.mul_(scale).to(kind), to_v.to(kind)
