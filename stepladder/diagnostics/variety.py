"""How much the siblings of a group still differ: the spread of their scores, their tokens, their surprisal.

Over *open* groups only: groups with at least two scored members that are not all solved. A group that is
solved has equal scores and equal answers because it is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from stepladder.types import Group, Trajectory


def open_groups(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The scored members of each group that is not simply solved; groups with fewer than two are left out."""
    out = []
    for group in groups:
        scored = [t for t in group.trajectories if t.failure is None and t.score.value is not None]
        if len(scored) >= 2 and not all(t.solved for t in scored):
            out.append(scored)
    return out


def variety_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`open_groups`, and over them `reward_std`, `sibling_overlap` and `surprisal` (NaN where none is open).

    reward_std: mean population standard deviation of the scores in a group. sibling_overlap: see
    `overlap`. surprisal: mean −log p of the sampled tokens, in nats: an estimate of the policy's entropy at
    the sampling temperature.
    """
    opened = open_groups(groups)
    tokens = [p for members in opened for t in members for turn in t.turns for p in turn.logprobs]
    return {
        "open_groups": len(opened) / max(len(groups), 1),
        "reward_std": _mean([spread([_value(t) for t in members]) for members in opened]),
        "sibling_overlap": _mean([overlap([_said(t) for t in members]) for members in opened]),
        "surprisal": -_mean(tokens),
    }


def spread(values: Sequence[float]) -> float:
    """Population standard deviation.

    >>> spread([1.0, 0.0, 1.0, 0.0])
    0.5
    """
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def overlap(texts: Sequence[Sequence[int]], *, n: int = 3) -> float:
    """Mean over pairs of the shared part of their n-grams (|A ∩ B| / |A ∪ B|); 1: all say the same.

    A sequence shorter than n counts as one gram.

    >>> overlap([(1, 2, 3, 4), (1, 2, 3, 5)])  # {123, 234} and {123, 235}: one of three
    0.3333333333333333
    """
    grams = [_grams(tuple(text), n) for text in texts]
    shares = [len(a & b) / len(a | b) for a, b in combinations(grams, 2)]
    return _mean(shares)


def _grams(text: tuple[int, ...], n: int) -> set[tuple[int, ...]]:
    if len(text) <= n:
        return {text}
    return {text[i : i + n] for i in range(len(text) - n + 1)}


def _said(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(token for turn in trajectory.turns for token in turn.token_ids)


def _value(trajectory: Trajectory) -> float:
    assert trajectory.score.value is not None
    return trajectory.score.value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
