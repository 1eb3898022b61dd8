"""Pack training samples into one flat row of tokens in which equal prefixes stand only once.

The trajectories of a group share their prompt, and often their first sampled tokens; every task of an
environment shares the system prompt. Computing each distinct prefix once is exact (a token's hidden
state depends on nothing but its prefix) and saves most of the work of an update.

    samples          A B C d e      the row   A B | C d e f | C' g        (one block a group)
                     A B C d f      blocks see the shared prefix A B and, inside the block,
                     A B C' g       only their own ancestors (a boolean mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepladder.data.prefix import common_prefix
from stepladder.types import TrainingSample

# Passes without gradients keep one layer's tensors, not all: so many times the tokens at once.
FORWARD_ONLY = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch `start:end` of the row. `mask[i, j]`: may token i see column j of [prefix | block]?

    `mask=None` means plain causal attention (the block is one chain and nothing stands before it).
    """

    start: int
    end: int
    mask: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One flat row of N tokens, U scored (source, target) pairs, and where each sample finds its scores.

    `sources[u]` is the row index whose hidden state predicts token `targets[u]`.
    `places[b]` holds, for sample b, the scored positions t in the sample and the index u of each.
    `rows[b][t]` is the row index of token t of sample b; where a prefix is shared, so is its index.
    """

    token_ids: NDArray[np.int64]  # [N]
    position_ids: NDArray[np.int64]  # [N]
    prefix: int
    blocks: tuple[Block, ...]
    sources: NDArray[np.int64]  # [U]
    targets: NDArray[np.int64]  # [U]
    places: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    rows: tuple[NDArray[np.int64], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class _Trie:
    """Distinct prefixes of a block's samples, as parent pointers in insertion order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def insert(self, ids: Sequence[int]) -> list[int]:
        """The node of every token of `ids`; the root is -1."""
        path, node, depth = [], -1, 0
        for token in ids:
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
            path.append(child)
            node, depth = child, depth + 1
        return path

    def mask(self, prefix: int) -> NDArray[np.bool_] | None:
        n = len(self.tokens)
        if prefix == 0 and self.parents == list(range(-1, n - 1)):
            return None
        mask = np.zeros((n, prefix + n), dtype=bool)
        mask[:, :prefix] = True
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node, prefix:] = mask[parent, prefix:]
            mask[node, prefix + node] = True
        return mask


def pack(
    samples: Sequence[TrainingSample], *, share_prefixes: bool = True, scored_only: bool = False
) -> PackedBatch:
    """Lay `samples` out in one row; every token whose mask is True gets a (source, target) pair.

    Samples of one `group_id` form a block; with `share_prefixes=False` each sample is its own block.
    `scored_only` leaves out what no score depends on: the last trained token of a sample, which is predicted
    and predicts nothing, and all after it. `rows` ends there too.
    """
    if not samples:
        raise ValueError("pack() needs at least one sample; got none")
    taken = [s.token_ids[: _needed(s.mask)] if scored_only else s.token_ids for s in samples]
    keys = [s.group_id if share_prefixes else str(i) for i, s in enumerate(samples)]
    order = list(dict.fromkeys(keys))
    prefix = 0
    if share_prefixes and len(order) > 1:
        # All share what the smallest and the largest share.
        shared = common_prefix(min(map(tuple, taken)), max(map(tuple, taken)))
        prefix = min(shared, min(len(ids) for ids in taken) - 1)
        prefix = prefix if prefix >= 8 else 0  # too short to pay for the extra columns

    tokens = list(samples[0].token_ids[:prefix])
    positions = list(range(prefix))
    blocks: list[Block] = []
    rows: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(samples)
    for key in order:
        trie, start = _Trie(), len(tokens)
        for b, token_ids in enumerate(taken):
            if keys[b] == key:
                path = trie.insert(token_ids[prefix:])
                rows[b] = np.concatenate([np.arange(prefix), np.asarray(path, np.int64) + start])
        tokens += trie.tokens
        positions += [depth + prefix for depth in trie.depths]
        blocks.append(Block(start, len(tokens), trie.mask(prefix)))

    scored: dict[tuple[int, int], int] = {}  # (source's row index, target) -> u
    places = []
    for row, sample in zip(rows, samples):
        at = np.flatnonzero(np.asarray(sample.mask, dtype=bool))
        pairs = [(int(row[t - 1]), sample.token_ids[t]) for t in at]
        units = [scored.setdefault(pair, len(scored)) for pair in pairs]
        places.append((at.astype(np.int64), np.asarray(units, np.int64)))
    pairs_found = np.asarray(list(scored), np.int64).reshape(-1, 2)
    return PackedBatch(
        token_ids=np.asarray(tokens, np.int64),
        position_ids=np.asarray(positions, np.int64),
        prefix=prefix,
        blocks=tuple(blocks),
        sources=pairs_found[:, 0],
        targets=pairs_found[:, 1],
        places=tuple(places),
        rows=tuple(rows),
    )


def _needed(mask: Sequence[bool]) -> int:
    """How many leading tokens the scores of a sample depend on; one at least, so that no row is empty."""
    last = max((t for t, trained in enumerate(mask) if trained), default=0)
    return max(last, 1)


def micro_batches(samples: Sequence[TrainingSample], token_budget: int) -> list[list[int]]:
    """Split sample indices into micro-batches of at most `token_budget` distinct tokens each.

    Samples of a group stay together while they fit, so that their shared prefix is computed once. A
    sample longer than the budget gets a micro-batch of its own: nothing is dropped.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1; got {token_budget}. A usual value is 4096")
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)

    batches: list[list[int]] = []
    current: list[int] = []
    used = 0
    for members in groups.values():
        for chunk, size in _chunks(samples, members, token_budget):
            if current and used + size > token_budget:
                batches.append(current)
                current, used = [], 0
            current = current + chunk
            used += size
    if current:
        batches.append(current)
    return batches


def _chunks(
    samples: Sequence[TrainingSample], members: Sequence[int], budget: int
) -> list[tuple[list[int], int]]:
    """Cut one group into chunks whose tries hold at most `budget` nodes (one trajectory at least).

    The samples of a split trajectory stay in one chunk: ratios and lengths are taken over all of them.
    """
    trajectories: dict[str, list[int]] = {}
    for i in members:
        trajectories.setdefault(samples[i].trajectory_id, []).append(i)
    chunks: list[tuple[list[int], int]] = []
    chunk: list[int] = []
    trie = _Trie()
    for part in trajectories.values():
        size = len(trie.tokens)
        for i in part:
            trie.insert(samples[i].token_ids)
        if chunk and len(trie.tokens) > budget:
            chunks.append((chunk, size))
            chunk, trie = [], _Trie()
            for i in part:
                trie.insert(samples[i].token_ids)
        chunk = chunk + part
    chunks.append((chunk, len(trie.tokens)))
    return chunks


def whole_sample(ids: tuple[int, ...], name: str) -> TrainingSample:
    """All tokens but the first are scored."""
    mask = (False, *(True,) * (len(ids) - 1))
    turns = (-1, *(0,) * (len(ids) - 1))
    return TrainingSample(ids, mask, (0.0,) * len(ids), name, turns, name)
