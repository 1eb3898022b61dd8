"""Which prefixes of the waiting prompts to compute once, and how to cut prefill into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepladder.data.prefix import common_prefix

Ids = tuple[int, ...]


def shared_prefixes(prompts: Sequence[Ids], known: Callable[[Ids], int], least: int) -> list[Ids]:
    """Prefixes worth a pass of their own: held by two prompts or more, `least` new tokens or more.

    `known(ids)` is how much of `ids` the prefix cache has. Shorter prefixes come before those that extend
    them. The last token of a prompt is never part of one: its logits are needed.

    >>> shared_prefixes([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 9)], lambda ids: 0, least=1)
    [(1, 2), (1, 2, 3)]
    """
    ordered = sorted(set(prompts))
    found: list[Ids] = []
    ranges = [(ordered, 0)] if len(ordered) > 1 else []
    while ranges:
        cluster, depth = ranges.pop(0)
        shared = min(common_prefix(cluster[0], cluster[-1]), min(map(len, cluster)) - 1)
        if shared > depth:
            depth = max(depth, known(cluster[0][:shared]))
            if shared - depth >= least:
                found.append(cluster[0][:shared])
                depth = shared
        ranges += [(part, depth) for part in _branches(cluster, shared) if len(part) > 1]
    return found


def _branches(cluster: list[Ids], at: int) -> list[list[Ids]]:
    """Sorted prompts that agree up to `at`, split by their token there; those that end there are left out."""
    parts: dict[int, list[Ids]] = {}
    for ids in cluster:
        if len(ids) > at + 1:
            parts.setdefault(ids[at], []).append(ids)
    return list(parts.values())


def batches(lengths: Sequence[int], budget: int, *, ragged: bool) -> list[int]:
    """Sizes of consecutive batches over `lengths` (longest first), of `budget` tokens at most.

    One row may exceed the budget alone. Where rows are padded to the longest (not `ragged`), a batch of k
    rows costs k × that, and no row in it is shorter than two thirds of it, short ones apart.

    >>> batches([100, 90, 40, 8, 2], budget=256, ragged=False)
    [2, 1, 2]
    >>> batches([100, 90, 40, 8, 2], budget=256, ragged=True)
    [5]
    """
    sizes: list[int] = []
    start = 0
    for i, length in enumerate(lengths):
        longest = lengths[start]
        if ragged:
            fits = sum(lengths[start : i + 1]) <= budget
        else:
            alike = length * 3 >= min(longest * 2, max(0, longest - 8) * 3)
            fits = alike and (i - start + 1) * longest <= budget
        if i > start and not fits:
            sizes.append(i - start)
            start = i
    if lengths:
        sizes.append(len(lengths) - start)
    return sizes
