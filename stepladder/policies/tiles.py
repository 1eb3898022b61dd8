"""Cutting the attention of a packed row into tiles that are computed side by side.

A tile is a stretch of queries and the tokens that one of them sees: of a group of siblings the shared prompt
and its own answer, of a causal chain what lies before. Hidden pairs cost little, for most are never computed.
Tiles of one batch have the same size, so that an operation serves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepladder.data.batching import Block

SIZES = (32, 48, 64, 96, 128)  # queries of a tile; the cheapest is taken
ROUND = 32  # columns: matrix kernels are compiled for each shape that they meet
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # tiles of a batch, for the same reason
PAIRS = 2**16  # of queries and columns in a batch, about at most: scores are made for all heads at once
OVERHEAD = 2**12  # pairs that take as long as a batch takes besides


@dataclass(frozen=True, slots=True)
class Tiles:
    """`count` tiles of Q queries, each of which meets its own C tokens.

    queries [count · Q] and columns [count · C] are places in the row. Of the queries those at `spare` only
    fill up and are another one's copy. hidden [count, 1, Q, 1, C - first] is added to the scores from column
    `first` on: 0 or -inf. All columns before are seen by all queries.
    """

    count: int
    queries: Tensor
    columns: Tensor
    spare: Tensor
    first: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """All queries of a row of N tokens. places [N]: where each has its result in the batches' rows, one batch
    after the other."""

    batches: tuple[Tiles, ...]
    places: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries `start:end`, the columns they meet, and who sees whom [end - start, columns]."""

    start: int
    end: int
    columns: NDArray[np.intp]
    seen: NDArray[np.bool_]

    @property
    def width(self) -> int:
        """Its columns, rounded up."""
        return -(-len(self.columns) // ROUND) * ROUND


def tiling(blocks: Sequence[Block], prefix: int, length: int) -> Tiling:
    """The row of `length` tokens, cut. What fills it up after the last block sees nothing but itself."""
    inside = max((block.end for block in blocks), default=prefix)
    chains = [Block(0, prefix, None), *blocks, Block(inside, length, None)]
    ends = _chain_ends(chains, prefix)
    best: tuple[int, list[list[_Tile]], int] | None = None
    for size in SIZES:
        tiles = [_tile(chains, prefix, start, end, length) for start, end in _cut(ends, size)]
        batches = list(_batches(tiles, size))
        cost = sum(OVERHEAD + _count(len(batch)) * size * batch[0].width for batch in batches)
        if best is None or cost < best[0]:
            best = cost, batches, size
    assert best is not None
    _, batches, size = best
    places = np.empty(length, dtype=np.int64)
    made, at = [], 0
    for batch in batches:
        for number, tile in enumerate(batch):
            first = at + number * size
            places[tile.start : tile.end] = np.arange(first, first + tile.end - tile.start)
        made.append(_laid_out(batch, size))
        at += made[-1].count * size
    return Tiling(tuple(made), torch.from_numpy(places))


def _chain_ends(chains: Sequence[Block], prefix: int) -> list[int]:
    """Where a token does not see the one before it, and the row's end."""
    ends = []
    for block in chains:
        if block.mask is not None:
            own = block.mask[:, prefix:]
            apart = np.flatnonzero(~own.diagonal(-1)) + 1
            ends += (block.start + apart).tolist()
        ends.append(block.end)
    return sorted(set(ends) - {0})


def _cut(ends: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Stretches of at most `size`; one that is half full ends where a chain does, and so does one that the
    next chain would only fit into in part, although it fits a stretch of its own."""
    start = before = 0
    for end in ends:
        if before > start and end - start > size >= end - before:
            yield start, before
            start = before
        while end - start > size:
            yield start, start + size
            start += size
        if end - start >= size / 2:
            yield start, end
            start = end
        before = end
    if start < before:
        yield start, before


def _tile(chains: Sequence[Block], prefix: int, start: int, end: int, length: int) -> _Tile:
    seen = np.zeros((end - start, length), dtype=bool)
    for block in chains:
        low, high = max(start, block.start), min(end, block.end)
        if low >= high:
            continue
        rows = slice(low - start, high - start)
        at = np.arange(low, high)
        if block.mask is None:
            seen[rows, block.start : high] = at[:, None] >= np.arange(block.start, high)
        else:
            own = block.mask[low - block.start : high - block.start]
            seen[rows, :prefix] = own[:, :prefix]
            seen[rows, block.start : block.end] = own[:, prefix:]
    columns = np.flatnonzero(seen.any(0))
    return _Tile(start, end, columns, seen[:, columns])


def _batches(tiles: Sequence[_Tile], size: int) -> Iterator[list[_Tile]]:
    """Tiles of about equal width together: while filling up costs less than another batch, and scores of a
    batch stay in the cache."""
    batch: list[_Tile] = []
    wasted = 0
    for tile in sorted(tiles, key=lambda tile: -tile.width):
        if batch:
            wasted += size * (batch[0].width - tile.width)
            full = (len(batch) + 1) * size * batch[0].width > PAIRS or len(batch) == COUNTS[-1]
            if full or wasted > OVERHEAD:
                yield batch
                batch, wasted = [], 0
        batch.append(tile)
    yield batch


def _count(tiles: int) -> int:
    return next(count for count in COUNTS if count >= tiles)


def _laid_out(batch: Sequence[_Tile], size: int) -> Tiles:
    count, width = _count(len(batch)), batch[0].width
    queries = np.zeros((count, size), dtype=np.int64)
    columns = np.zeros((count, width), dtype=np.int64)
    seen = np.zeros((count, size, width), dtype=bool)
    spare = np.ones((count, size), dtype=bool)
    for number, tile in enumerate(itertools.islice(itertools.cycle(batch), count)):
        n, c = tile.seen.shape
        queries[number] = np.minimum(np.arange(tile.start, tile.start + size), tile.end - 1)
        columns[number, :c] = tile.columns
        seen[number, :n, :c] = tile.seen
        seen[number, n:, :c] = tile.seen[-1]
        spare[number, : n if number < len(batch) else 0] = False
    partly = np.flatnonzero(~seen.all((0, 1)))
    first = int(partly[0]) if len(partly) else width
    hidden = torch.zeros(count, 1, size, 1, width - first)
    hidden.masked_fill_(torch.from_numpy(~seen[:, None, :, None, first:]), float("-inf"))
    return Tiles(
        count,
        torch.from_numpy(queries.reshape(-1)),
        torch.from_numpy(columns.reshape(-1)),
        torch.from_numpy(np.flatnonzero(spare)),
        first,
        hidden,
    )
