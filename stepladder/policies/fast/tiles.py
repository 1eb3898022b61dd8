"""Cutting the attention of a packed row into tiles that are computed side by side.

A tile is a stretch of queries and the tokens that one of them sees: of a group of siblings the shared prompt
and its own answer, of a causal chain what lies before. Hidden pairs cost little, for most are never computed.
Tiles of one batch have the same size, so that an operation serves them all.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepladder.data.batching import Block

SIZES = (8, 16, 32, 48, 64, 96, 128)  # queries of a tile; the cheapest is taken
ROUND = 32  # columns: matrix kernels are compiled for each shape that they meet
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # tiles of a batch, for the same reason
PAIRS = 2**16  # of queries and columns in a batch, about at most: scores are made for all heads at once
MOST = 2**18  # pairs of a single tile, which long rows get smaller tiles for
OVERHEAD = 2**12  # pairs that take as long as a batch takes besides
GATHERED = 8  # queries that would cost as much as bringing a tile's columns together


@dataclass(frozen=True, slots=True)
class Tiles:
    """`count` tiles of Q queries, each of which meets its own C tokens.

    queries [count · Q] are places in the row; of them those at `spare` only fill up and are another one's
    copy. columns [count · C] are places too, less `low`; they end before `high`. None: one tile's, all from
    `low` to `high`. hidden [count, 1, Q, 1, C - first] is added to the scores from column `first` on: 0 or
    -inf. All columns before are seen by all queries.
    """

    count: int
    queries: Tensor
    spare: Tensor
    columns: Tensor | None
    low: int
    high: int
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
    """Queries `start:end`, and how many columns they meet, rounded up."""

    start: int
    end: int
    width: int


class _Row:
    """Who sees whom: the shared prefix, the blocks, and what fills the row up and sees nothing but itself."""

    def __init__(self, blocks: Sequence[Block], prefix: int, length: int) -> None:
        inside = max((block.end for block in blocks), default=prefix)
        chains = [Block(0, prefix, None), *blocks, Block(inside, length, None)]
        self.prefix, self.length = prefix, length
        self.blocks = sorted((b for b in chains if b.start < b.end), key=lambda block: block.start)
        self._starts = [block.start for block in self.blocks]

    def tile(self, start: int, end: int) -> _Tile:
        """That of the queries `start:end`."""
        block, low, high = next(self._overlapping(start, end))
        alone = block.mask is None and (low, high) == (start, end)  # a causal chain, which may be very long
        count = end - block.start if alone else len(self.columns(start, end))
        return _Tile(start, end, -(-count // ROUND) * ROUND)

    def columns(self, start: int, end: int) -> NDArray[np.intp]:
        """What the queries `start:end` meet, in order."""
        shared, parts = np.zeros(self.prefix, dtype=bool), []
        for block, low, high in self._overlapping(start, end):
            if block.mask is None:
                parts.append(np.arange(block.start, high))
            else:
                own: NDArray[np.bool_] = np.asarray(block.mask[low - block.start : high - block.start].any(0))
                shared |= own[: self.prefix]
                parts.append(block.start + np.flatnonzero(own[self.prefix :]))
        parts = [np.flatnonzero(shared), *parts] if shared.any() else parts
        return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))

    def seen(self, start: int, end: int, columns: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of `columns` each query sees, [end - start, columns]."""
        prefix = self.prefix
        seen = np.zeros((end - start, len(columns)), dtype=bool)
        shared = int(np.searchsorted(columns, prefix))
        for block, low, high in self._overlapping(start, end):
            rows = slice(low - start, high - start)
            here = slice(*np.searchsorted(columns, (block.start, block.end)).tolist())
            if block.mask is None:
                seen[rows, here] = np.arange(low, high)[:, None] >= columns[here]
            else:
                own = block.mask[low - block.start : high - block.start]
                seen[rows, :shared] = own[:, columns[:shared]]
                seen[rows, here] = own[:, prefix + columns[here] - block.start]
        return seen

    def _overlapping(self, start: int, end: int) -> Iterator[tuple[Block, int, int]]:
        """Blocks with their parts of `start:end`."""
        first = bisect.bisect_right(self._starts, start) - 1
        for block in self.blocks[first:]:
            if block.start >= end:
                break
            yield block, max(start, block.start), min(end, block.end)


def tiling(blocks: Sequence[Block], prefix: int, length: int) -> Tiling:
    """The row of `length` tokens, cut. What fills it up after the last block sees nothing but itself."""
    row = _Row(blocks, prefix, length)
    batches, size = _cheapest(row)
    places = np.empty(length, dtype=np.int64)
    made, at = [], 0
    for batch in batches:
        for number, tile in enumerate(batch):
            first = at + number * size
            places[tile.start : tile.end] = np.arange(first, first + tile.end - tile.start)
        made.append(_laid_out(row, batch, size))
        at += made[-1].count * size
    return Tiling(tuple(made), torch.from_numpy(places))


def _cheapest(row: _Row) -> tuple[list[list[_Tile]], int]:
    """(batches, size) of the fewest pairs, batches counted with their overhead."""
    ends = _chain_ends(row)
    best: tuple[int, list[list[_Tile]], int] | None = None
    for size in SIZES:
        tiles = [row.tile(start, end) for start, end in _cut(ends, size)]
        if best is not None and size * max(tile.width for tile in tiles) > MOST:
            break
        batches = list(_batches(tiles, size))
        cost = sum(OVERHEAD + _count(len(b)) * (size + GATHERED) * b[0].width for b in batches)
        if best is None or cost < best[0]:
            best = cost, batches, size
    assert best is not None
    return best[1], best[2]


def _chain_ends(row: _Row) -> list[int]:
    """Where a token does not see the one before it, and the row's end."""
    ends = []
    for block in row.blocks:
        if block.mask is not None:
            own = block.mask[:, row.prefix :]
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


def _laid_out(row: _Row, batch: Sequence[_Tile], size: int) -> Tiles:
    count, width = _count(len(batch)), batch[0].width
    queries = np.zeros((count, size), dtype=np.int64)
    columns = np.zeros((count, width), dtype=np.int64)
    seen = np.zeros((count, size, width), dtype=bool)
    spare = np.ones((count, size), dtype=bool)
    for number, tile in enumerate(itertools.islice(itertools.cycle(batch), count)):
        met = row.columns(tile.start, tile.end)
        if len(batch) == 1 and met[-1] - met[0] < width <= row.length - met[0]:
            met = np.arange(met[0], met[0] + width)  # a stretch of the row needs no gathering
        n, c = tile.end - tile.start, len(met)
        queries[number] = np.minimum(np.arange(tile.start, tile.start + size), tile.end - 1)
        columns[number] = met[-1]
        columns[number, :c] = met
        seen[number, :n, :c] = row.seen(tile.start, tile.end, met)
        seen[number, n:, :c] = seen[number, n - 1, :c]
        spare[number, : n if number < len(batch) else 0] = False
    partly = np.flatnonzero(~seen.all((0, 1)))
    first = int(partly[0]) if len(partly) else width
    hidden = torch.zeros(count, 1, size, 1, width - first)
    hidden.masked_fill_(torch.from_numpy(~seen[:, None, :, None, first:]), float("-inf"))
    low, high = int(columns.min()), int(columns.max()) + 1
    stretch = count == 1 and high - low == width
    return Tiles(
        count,
        torch.from_numpy(queries.reshape(-1)),
        torch.from_numpy(np.flatnonzero(spare)),
        None if stretch else torch.from_numpy(columns.reshape(-1) - low),
        low,
        high,
        first,
        hidden,
    )
