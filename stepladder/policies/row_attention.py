"""Attention over a packed row on a CPU, forward and backward as matrix products.

The row is cut into stretches of queries, whatever blocks they belong to. Each stretch meets only the tokens
that one of its queries sees: of a group of siblings the shared prompt and its own answer, of a causal chain
what lies before. Scores of one stretch fit a core's cache, and hidden pairs cost little, for most are never
computed. torch's own kernel computes all pairs of a block and wants the keys of grouped heads repeated; its
backward pass takes twice as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepladder.data.batching import Block

STRETCH = 96  # queries
SHORT = 32  # a stretch of so many ends where its block does
PAIRS = 2**18  # of a stretch, at most: scores are made for all heads at once
ROUND = 32  # columns: matrix kernels are compiled for each shape that they meet


@dataclass(frozen=True, slots=True)
class Stretch:
    """Queries `start:end` and the c tokens they meet, which are `runs` of the row.

    `hidden` [end - start, 1, c - first] is added to the scores from column `first` on: 0 or -inf. All columns
    before are seen by all queries.
    """

    start: int
    end: int
    runs: tuple[slice, ...]
    first: int
    hidden: Tensor

    @property
    def count(self) -> int:
        """c."""
        return self.first + self.hidden.shape[-1]

    def of(self, rows: Tensor) -> Tensor:
        """[heads, c, d] of [N, heads, d], a copy."""
        found = [rows[run] for run in self.runs]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.transpose(0, 1).contiguous()

    def add_to(self, rows: Tensor, values: Tensor) -> None:
        """values [heads, c, d] onto rows [N, heads, d]; columns that only fill up carry zeros."""
        at = 0
        for run in self.runs:
            size = run.stop - run.start
            rows[run] += values[:, at : at + size].transpose(0, 1)
            at += size

    def queries(self, rows: Tensor, kv: int) -> Tensor:
        """[kv_heads, (end - start) · group, d] of [N, heads, d]: side by side those that meet one key."""
        n, heads, d = self.end - self.start, rows.shape[1], rows.shape[2]
        part = rows[self.start : self.end].reshape(n, kv, heads // kv * d)
        return part.transpose(0, 1).contiguous().view(kv, -1, d)

    def put(self, rows: Tensor, values: Tensor) -> None:
        """The reverse of `queries`, into `rows`."""
        n, heads, d = self.end - self.start, rows.shape[1], rows.shape[2]
        kv = values.shape[0]
        rows[self.start : self.end].view(n, kv, heads // kv * d).copy_(values.view(kv, n, -1).transpose(0, 1))


def stretches(blocks: Sequence[Block], prefix: int, length: int) -> list[Stretch]:
    """The row of `length` tokens, cut. What fills it up after the last block sees nothing but itself."""
    inside = max((block.end for block in blocks), default=prefix)
    chains = [Block(0, prefix, None), *blocks, Block(inside, length, None)]
    size = max(1, min(STRETCH, PAIRS // length))
    cuts = [0]
    for at in [*(block.end for block in blocks), length]:
        while at - cuts[-1] > size:
            cuts.append(cuts[-1] + size)
        if at - cuts[-1] >= SHORT:
            cuts.append(at)
    if cuts[-1] < length:
        cuts = [*cuts[:-1], length] if len(cuts) > 1 else [0, length]
    out = []
    for start, end in itertools.pairwise(cuts):
        seen = np.zeros((end - start, length), dtype=bool)
        for block in chains:
            _mark(seen, start, end, block, prefix)
        out.append(_stretch(seen, start, end))
    return out


def _mark(seen: NDArray[np.bool_], start: int, end: int, block: Block, prefix: int) -> None:
    low, high = max(start, block.start), min(end, block.end)
    if low >= high:
        return
    rows = slice(low - start, high - start)
    at = np.arange(low, high)
    if block.mask is None:
        seen[rows, block.start : high] = at[:, None] >= np.arange(block.start, high)
    else:
        own = block.mask[low - block.start : high - block.start]
        seen[rows, :prefix] = own[:, :prefix]
        seen[rows, block.start : block.end] = own[:, prefix:]


def _stretch(seen: NDArray[np.bool_], start: int, end: int) -> Stretch:
    needed: NDArray[np.bool_] = np.asarray(seen.any(0))
    missing = -int(needed.sum()) % ROUND
    if missing:  # fill up with columns that nobody sees, next to those that are
        free = np.flatnonzero(~needed)
        free = np.concatenate([free[free >= end][::-1], free[free < end]])
        np.put(needed, free[len(free) - min(missing, len(free)) :], True)
    columns = np.flatnonzero(needed)
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    seen = seen[:, columns]
    partly = np.flatnonzero(~seen.all(0))
    first = int(partly[0]) if len(partly) else len(columns)
    hidden = torch.zeros(end - start, 1, len(columns) - first)
    hidden.masked_fill_(torch.from_numpy(~seen[:, None, first:]), float("-inf"))
    return Stretch(start, end, tuple(slice(int(r[0]), int(r[-1]) + 1) for r in runs), first, hidden)


class _RowAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ) v of q [N, heads, d], k and v [N, kv_heads, d or another], as [N, heads, d'].

    Scores and their gradients are float32 at least, and the products with p and its gradient are in the
    inputs' type, as in torch's. Keeps q, k and v alone.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Stretch], scale: float) -> Tensor:
        kind, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for part in parts:
            asked = part.queries(q, k.shape[1]).to(wide) * scale
            p = _probabilities(asked, part.of(k).to(wide), part)
            part.put(out, torch.bmm(p.to(kind), part.of(v)))
        ctx.save_for_backward(q, k, v)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        return (*_gradients(q, k, v, ctx.parts, ctx.scale, grad), None, None)


def _probabilities(asked: Tensor, keys: Tensor, part: Stretch) -> Tensor:
    """[kv_heads, (end - start) · group, c]."""
    scores = torch.bmm(asked, keys.transpose(1, 2))
    if part.first < part.count:
        kv, n = asked.shape[0], part.end - part.start
        scores.view(kv, n, -1, part.count)[..., part.first :] += part.hidden
    return torch.softmax(scores, -1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Stretch], scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes of q, k and v."""
    kv, kind, wide = k.shape[1], q.dtype, torch.promote_types(q.dtype, torch.float32)
    to_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    to_k, to_v = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
    for part in parts:
        asked, slope = part.queries(q, kv), part.queries(grad, kv)
        keys, values = part.of(k), part.of(v)
        p = _probabilities(asked.to(wide) * scale, keys.to(wide), part)
        part.add_to(to_v, torch.bmm(p.to(kind).transpose(1, 2), slope))
        # softmax: ds = p·(dp − Σ p·dp)
        to_p = torch.bmm(slope.to(wide), values.to(wide).transpose(1, 2))
        along = torch.linalg.vecdot(p, to_p).unsqueeze(-1)
        to_scores = to_p.sub_(along).mul_(p).to(kind)
        part.put(to_q, torch.bmm(to_scores, keys))
        part.add_to(to_k, torch.bmm(to_scores.transpose(1, 2), asked))
    return to_q.mul_(scale), to_k.mul_(scale).to(kind), to_v.to(kind)


def row_attention(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Stretch], scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the tokens that each query sees, [N, heads, d'].

    q is [N, heads, d], k [N, kv_heads, d] and v [N, kv_heads, d']. Gradients flow to all three.
    """
    out: Tensor = _RowAttention.apply(q, k, v, parts, scale)  # type: ignore[no-untyped-call]
    return out
