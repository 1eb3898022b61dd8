"""What more samples buy: pass@k, maj@k, best-of-k and weighted votes, with intervals over tasks.

    pass@k      one of k is right: what a perfect verifier would reach
    best@k      the one that the reward scores highest is right
    maj@k       the most frequent answer is right
    weighted@k  the answer with the largest sum of scores is right

Every task stays in the denominator, and every episode in its task: a failed one is unsolved and has no vote.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepladder.errors import ConfigError
from stepladder.evaluation.result import Sample, TaskSamples
from stepladder.objectives.estimators import majority_vote, pass_at_k, weighted_vote
from stepladder.reports.tables import wilson_interval

Kind = Literal["pass", "maj", "best", "weighted"]
DRAWS = 200  # subsets of a task over which a vote of k < n is averaged
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Point:
    """A share of tasks at k samples, with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One way of using k samples, over k."""

    kind: Kind
    points: tuple[Point, ...]

    def at(self, k: int) -> Point:
        return next(point for point in self.points if point.k == k)


def curve(tasks: Sequence[TaskSamples], kind: Kind, ks: Sequence[int], *, seed: int = 0) -> Curve:
    """Return the curve of one kind. Raises ConfigError for a k above the samples of a task.

    Where every task was played once, solved tasks are a count, and the interval is Wilson's.
    """
    once = all(len(task.samples) == 1 for task in tasks)
    points = []
    for k in ks:
        values = [task_value(task, kind, k, seed=seed) for task in tasks]
        if once:
            low, high = wilson_interval(round(sum(values)), len(values))
        else:
            low, high = bootstrap_interval(values, seed=seed)
        points.append(Point(k, sum(values) / len(values), low, high))
    return Curve(kind, tuple(points))


def task_value(task: TaskSamples, kind: Kind, k: int, *, seed: int = 0) -> float:
    """Return the chance that k of the task's samples, drawn without replacement, end in a right answer."""
    n = len(task.samples)
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} of the {n} samples of task {task.task}; draw more: --samples {k}")
    if kind == "pass":
        return pass_at_k(n, task.solved, k)
    if kind == "best":
        return best_of_k(task.samples, k)
    if k == 1:
        return task.solved / n  # whoever votes alone decides
    vote = _weighted if kind == "weighted" else _majority
    return _mean_vote(task, k, vote, seed)


def best_of_k(samples: Sequence[Sample], k: int) -> float:
    """Return P(the highest-scored of k drawn without replacement is right), exactly.

    With m samples scored at most s, C(m, k)/C(n, k) of the subsets have no higher score; the difference
    between neighbouring scores is how often the best has score s, and equals among them are equally likely.
    Unscored samples come last.

    >>> best_of_k([Sample(True, score=0.9), Sample(False, score=0.5)], 2)
    1.0
    """
    scores = [-math.inf if s.score is None else s.score for s in samples]
    total, chance = math.comb(len(samples), k), 0.0
    for score in sorted(set(scores)):
        equal = [s.solved for s, own in zip(samples, scores, strict=True) if own == score]
        upto = sum(own <= score for own in scores)
        won = (math.comb(upto, k) - math.comb(upto - len(equal), k)) / total
        chance += won * sum(equal) / len(equal)
    return chance


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of `values` in [0, 1], by resampling tasks.

    Where all tasks have the same value, such as 0 or 1, resampling shows no spread; then it is Wilson's for
    that count.
    """
    if len(set(values)) == 1:
        return wilson_interval(round(sum(values)), len(values))
    means = resampled_means(values, seed=seed, resamples=resamples)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def resampled_means(values: Sequence[float], *, seed: int, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Return the means of `resamples` draws of len(values) tasks with replacement, [resamples]."""
    if not values:
        raise ConfigError("an interval needs at least one task; got none")
    rng = np.random.default_rng(seed)
    table = np.asarray(values, dtype=np.float64)
    means: NDArray[np.float64] = table[rng.integers(0, len(table), (resamples, len(table)))].mean(axis=1)
    return means


def crossover(one: Curve, other: Curve) -> int | None:
    """Return the smallest k at which the curve that lags at first has caught up; None where it never does.

    Base against trained, pass@k: a base that catches up says that training sharpened what was there.
    """
    first = one.points[0].value - other.points[0].value
    for a in one.points[1:]:
        gap = a.value - other.at(a.k).value
        if first != 0 and gap * first <= 0:
            return a.k
    return None


Vote = Callable[[Sequence[Sample]], str | None]


def _mean_vote(task: TaskSamples, k: int, vote: Vote, seed: int) -> float:
    """Return how often the vote is right: of all samples in their order, or of random subsets of k."""
    right = {s.answer for s in task.samples if s.solved}
    if k == len(task.samples):
        return float(_counts(vote(task.samples), right))
    rng = random.Random(f"{seed}/{task.task}/{k}")
    won = sum(_counts(vote(rng.sample(task.samples, k)), right) for _ in range(DRAWS))
    return won / DRAWS


def _counts(answer: str | None, right: set[str | None]) -> bool:
    return answer is not None and answer in right


def _majority(samples: Sequence[Sample]) -> str | None:
    answers = [s.answer for s in samples if s.answer is not None]
    return str(majority_vote(answers)) if answers else None


def _weighted(samples: Sequence[Sample]) -> str | None:
    voters = [(s.answer, s.score) for s in samples if s.answer is not None and s.score is not None]
    if not voters:
        return None
    return str(weighted_vote([a for a, _ in voters], [score for _, score in voters]))
