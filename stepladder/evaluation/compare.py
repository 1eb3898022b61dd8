"""Two models on the same tasks: what each task says, not two intervals side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepladder.errors import ConfigError
from stepladder.evaluation.curves import resampled_means, task_value
from stepladder.evaluation.result import TaskSamples
from stepladder.reports.tables import sign_test, wilson_interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """`one` minus `other`, each the mean over tasks of the share of solved samples, or of pass@k.

    `p` is the two-sided p-value of the hypothesis that the models are equal.

    `better`, `worse`, `equal` count tasks by the sign of their difference. `interval` holds the true
    difference in 95 % of repetitions with other tasks (paired bootstrap; where all tasks differ by the same,
    such as 0, by what Wilson's interval allows for a kind of task that n tasks did not show).
    """

    n: int
    one: float
    other: float
    difference: float
    interval: tuple[float, float]
    better: int
    worse: int
    equal: int
    p: float


def compare(
    one: Sequence[TaskSamples], other: Sequence[TaskSamples], *, k: int = 1, seed: int = 0
) -> Comparison:
    """Compare two models that played the same tasks, in the same order, by pass@k (k = 1: the share solved).

    Raises ConfigError where the tasks differ.
    """
    if [t.task for t in one] != [t.task for t in other] or not one:
        raise ConfigError(
            f"a paired comparison needs the same tasks on both sides; got {len(one)} and {len(other)}"
        )
    shares = [[task_value(t, "pass", k) for t in side] for side in (one, other)]
    gaps = [a - b for a, b in zip(*shares, strict=True)]
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    n = len(gaps)
    if len(set(gaps)) == 1:  # resampling would show no spread
        unseen = wilson_interval(0, n)[1]
        low, high = max(-1.0, gaps[0] - unseen), min(1.0, gaps[0] + unseen)
    else:
        low, high = np.quantile(resampled_means(gaps, seed=seed), [0.025, 0.975])
    return Comparison(
        n=n,
        one=sum(shares[0]) / n,
        other=sum(shares[1]) / n,
        difference=sum(gaps) / n,
        interval=(float(low), float(high)),
        better=better,
        worse=worse,
        equal=n - better - worse,
        p=sign_test(better, worse),
    )


def by_domain(
    one: Sequence[TaskSamples], other: Sequence[TaskSamples], *, seed: int = 0
) -> dict[str, Comparison]:
    """Compare within each domain: what was gained here, and lost elsewhere."""
    domains = dict.fromkeys(t.domain for t in one)
    return {
        d: compare([t for t in one if t.domain == d], [t for t in other if t.domain == d], seed=seed)
        for d in domains
    }
