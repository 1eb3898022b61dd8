"""Does a model know when it is right? The share of votes of its answer, against how often that is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stepladder.evaluation.result import TaskSamples


@dataclass(frozen=True, slots=True)
class Bin:
    """Tasks whose majority answer had a share of votes in [low, high), or up to 1."""

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """`ece` is Σ n_bin/n · |accuracy − confidence|. Where `gap` > 0, the model is surer than right."""

    n: int
    ece: float
    gap: float
    bins: tuple[Bin, ...]


def calibration(tasks: Sequence[TaskSamples], *, bins: int = 10) -> Calibration:
    """Return how sure of their majority answers tasks are, and how often these are right.

    Confidence is the majority's share of *all* episodes.

    An episode without an answer votes for nobody, so a task without any answer has confidence 0.
    """
    pairs = [_majority(task) for task in tasks]
    found = []
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [(c, r) for c, r in pairs if min(int(c * bins), bins - 1) == b]
        if inside:
            n = len(inside)
            found.append(Bin(low, high, n, sum(c for c, _ in inside) / n, sum(r for _, r in inside) / n))
    n = len(pairs)
    ece = sum(b.n * abs(b.accuracy - b.confidence) for b in found) / n
    gap = sum(c - r for c, r in pairs) / n
    return Calibration(n, ece, gap, tuple(found))


def _majority(task: TaskSamples) -> tuple[float, bool]:
    """(share of votes, right?) of the most frequent answer, the one seen first among equals."""
    votes = Counter(s.answer for s in task.samples if s.answer is not None)
    if not votes:
        return 0.0, False
    answer, count = votes.most_common(1)[0]
    right = any(s.solved for s in task.samples if s.answer == answer)
    return count / len(task.samples), right
