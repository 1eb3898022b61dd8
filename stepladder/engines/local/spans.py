"""How the rows of a pass attend to their caches: side by side where they are alike, else each on its own.

The heads of a group are laid side by side as queries of their key head, so that keys and values are never
repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepladder.engines.local.cache import bucketed

FEW = 2  # rows that decode for which one fused kernel beats two batched products
SHORT = 2**14  # pairs of a row's new tokens and what they see; up to there two products beat the kernel
PAIRS = 2**17  # of all rows that attend at once, which keeps their scores in a core's reach
FILLED = 0.75  # of the pairs of such rows are theirs, at least; the others only fill up


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` slots from `slot` on with up to `queries` new tokens each, which are the pass's tokens from
    `token` to `end`. The first `read` positions of the cache are looked at.

    Where rows have unequal numbers of tokens, `gather` [rows · queries] says which token stands at each
    place (the last one again where there are no more), and `scatter` the place of each token.
    mask [rows, 1, queries, read] is added to the scores; None where the rows are one which sees all, or is
    plain causal. by_head [rows · kv_heads, queries · group, read] is the same for products over heads, in the
    type of their scores: float32 where rows have several tokens, as in torch's kernel.
    """

    token: int
    end: int
    slot: int
    rows: int
    queries: int
    read: int
    gather: Tensor | None
    scatter: Tensor | None
    mask: Tensor | None
    by_head: Tensor | None


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention, and what its masks are made of."""

    kv: int
    group: int
    dtype: torch.dtype
    device: torch.device


def spans(
    lengths: Sequence[int], starts: Sequence[int], slot: int, longest: int, heads: Heads, *, by_bucket: bool
) -> list[Span]:
    """Rows with `lengths` new tokens after `starts` others, cut; a cache has `longest` positions.

    A row that decodes alone reads as far as it goes or, `by_bucket`, a bucket, as recorded graphs want it.
    """
    made, token = [], 0
    for first, rows in _runs(lengths, starts, heads):
        new, begun = lengths[first : first + rows], starts[first : first + rows]
        made.append(_span(token, slot + first, new, begun, longest, heads, by_bucket))
        token += sum(new)
    return made


def _runs(lengths: Sequence[int], starts: Sequence[int], heads: Heads) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of what attends at once."""
    first = 0
    while first < len(lengths):
        rows = 1
        if lengths[first] == 1:
            rows = sum(1 for _ in itertools.takewhile(lambda new: new == 1, lengths[first:]))
        elif heads.device.type == "cpu":
            rows = _alike(lengths[first:], starts[first:])
        yield first, rows
        first += rows


def _alike(lengths: Sequence[int], starts: Sequence[int]) -> int:
    """How many rows, from the first on, have several new tokens and are worth computing side by side."""
    rows, queries, seen = 1, lengths[0], starts[0] + lengths[0]
    own = queries * seen
    for new, start in zip(lengths[1:], starts[1:], strict=True):
        end = start + new
        wide, far = max(queries, new), max(seen, end)
        pairs = (rows + 1) * wide * far
        long = max(queries * seen, new * end) > SHORT
        if new == 1 or long or pairs > PAIRS or own + new * end < FILLED * pairs:
            break
        rows, queries, seen, own = rows + 1, wide, far, own + new * end
    return rows


def _span(
    token: int,
    slot: int,
    new: Sequence[int],
    begun: Sequence[int],
    longest: int,
    heads: Heads,
    by_bucket: bool,
) -> Span:
    rows, queries = len(new), max(new)
    ends = [start + count for start, count in zip(begun, new, strict=True)]
    alone = rows == 1 and (queries > 1 or not by_bucket)
    read = ends[0] if alone else min(bucketed(max(ends)), longest)
    device = heads.device
    at = torch.arange(queries, device=device)
    count = torch.tensor(new, device=device)[:, None]
    own = torch.minimum(at, count - 1)  # [rows, queries]
    gather = scatter = None
    if min(new) < queries:
        gather = (own + (count.cumsum(0) - count)).flatten()
        scatter = (at < count).flatten().nonzero()[:, 0]
    mask = by_head = None
    if not (rows == 1 and read == ends[0] and queries in (1, read)):
        last = torch.tensor(begun, device=device)[:, None] + own
        seen = torch.arange(read, device=device) <= last[:, :, None]
        mask = torch.zeros(seen.shape, dtype=heads.dtype, device=device).masked_fill_(~seen, float("-inf"))
        mask = mask[:, None]
    if mask is not None and device.type == "cpu" and rows > (FEW if queries == 1 else 1):
        shape = (rows, heads.kv, queries, heads.group, read)
        kind = heads.dtype if queries == 1 else torch.promote_types(heads.dtype, torch.float32)
        by_head = mask[:, :, :, None].expand(shape).reshape(rows * heads.kv, -1, read).to(kind).contiguous()
    return Span(token, token + sum(new), slot, rows, queries, read, gather, scatter, mask, by_head)


def attend(query: Tensor, kv: Tensor, span: Span) -> Tensor:
    """query [N, heads, d] over kv [2, rows, kv_heads, T, d]: [the span's tokens, heads · d]."""
    b, n, k, d = span.rows, span.queries, kv.shape[2], kv.shape[4]
    query = query[span.token : span.end]
    keys, values = kv[:, span.slot : span.slot + b, :, : span.read]
    if b == 1 and n > 1:
        return _alone(query, keys, values, span.mask)
    if n == 1 and (b <= FEW or span.mask is None):
        query = query.reshape(b, k, -1, d)
        mask = None if span.mask is None else span.mask.expand(b, k, query.shape[2], span.read)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).view(b, -1)
    if span.by_head is None:  # rows that decode, elsewhere than on a CPU
        assert span.mask is not None
        scores = torch.matmul(query.reshape(b, k, -1, d) * d**-0.5, keys.transpose(-1, -2)).add_(span.mask)
        return torch.matmul(scores.softmax(-1), values).view(b, -1)
    if span.gather is not None:
        query = query.index_select(0, span.gather)
    query = query.reshape(b, n, k, -1).transpose(1, 2).reshape(b * k, -1, d)
    keys, values = (t.reshape(b * k, span.read, d) for t in (keys, values))
    wide = span.by_head.dtype
    scores = torch.baddbmm(span.by_head, query.to(wide), keys.to(wide).transpose(1, 2), alpha=d**-0.5)
    mixed = torch.bmm(scores.softmax(-1).to(values.dtype), values)
    out = mixed.view(b, k, n, -1).transpose(1, 2).reshape(b * n, -1)
    return out if span.scatter is None else out.index_select(0, span.scatter)


def _alone(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One row with several tokens: [n, heads · d]."""
    n, heads, d = query.shape
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=heads > keys.shape[1],
    )
    return out[0].transpose(0, 1).reshape(n, heads * d)
