"""Which groups are trained on: play some, drop what cannot teach, play others, and know when to stop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepladder.errors import NothingToLearn
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.episodes import equal_scores
from stepladder.types import Group, Task

Draw = list[tuple[str, Task]]
DRY_STEPS = 3  # without a single live group, each with all its refills: then the run stops


@dataclass(frozen=True, slots=True)
class Collected:
    """`played`: every group of the step, for the log and the metrics. `kept`: indices of those trained on."""

    played: list[Group]
    kept: list[int]
    metrics: Metrics


def collect(
    play: Callable[[Draw], list[Group]],
    draw: Callable[[int], Draw],
    *,
    groups: int,
    dynamic: bool = False,
    max_refills: int = 8,
    keep: float = 1.0,
) -> Collected:
    """Play `groups` groups; with `dynamic` until as many differ in their scores, at most `max_refills` times.

    What is judged is the score before any bonus or length penalty: those would make every group differ.
    Then the `keep` share of the widest is kept (RAGEN's StarPO-S, arXiv:2504.20073: int(keep·N), at least
    one). With fewer live groups than asked for, those are kept; with none, `groups_kept` is 0 and the first
    groups stand in, so that the sampler is still compared with the trainer. At the end of the data
    there are fewer, or none.
    """
    played: list[Group] = []
    live: list[int] = []
    rounds = 0
    while True:
        fresh = play(draw(groups - len(live)))
        if not fresh:  # the data are at their end
            break
        live += [len(played) + i for i, g in enumerate(fresh) if not dynamic or not dead(g)]
        played += fresh
        if len(live) >= groups or rounds == max_refills or not dynamic:
            break
        rounds += 1
    metrics: Metrics = {}
    if dynamic:
        metrics["refills"] = float(rounds)
    if keep < 1 and live:
        wanted = max(1, int(keep * len(live)))
        widest = sorted(live, key=lambda i: -spread(played[i]))[:wanted]
        live = sorted(widest)
    if dynamic or keep < 1:
        metrics["groups_kept"] = float(len(live))
    return Collected(played, live or list(range(min(groups, len(played)))), metrics)


def scores_of(group: Group) -> list[float]:
    """The scores of the episodes that have one."""
    return [t.score.value for t in group.trajectories if t.failure is None and t.score.value is not None]


def dead(group: Group) -> bool:
    """Nothing tells its members apart: equal scores within float noise, or fewer than two."""
    return equal_scores(scores_of(group))


def spread(group: Group) -> float:
    """Population deviation of the group's scores; 0 for a dead group."""
    return 0.0 if dead(group) else statistics.pstdev(scores_of(group))


def _share(groups: Sequence[Group]) -> float:
    whole = [t for g in groups for t in g.trajectories if t.failure is None]
    return sum(t.solved for t in whole) / max(len(whole), 1)


def nothing_to_learn(played: Sequence[Group]) -> NothingToLearn:
    """What to say, with the solve rates, when step after step no group differs in its scores."""
    rates = {
        domain: _share([g for g in played if g.task.domain == domain])
        for domain in sorted({g.task.domain for g in played})
    }
    listed = ", ".join(f"{domain} {rate:.0%}" for domain, rate in rates.items())
    what = "they are all solved" if _share(played) == 1.0 else "too hard or too easy for this policy"
    return NothingToLearn(
        f"{DRY_STEPS} steps in a row had no group whose episodes earned different scores (the last: "
        f"{len(played)} groups), so nothing can be learned from these tasks: {what}. Solve rates: {listed}. "
        "Mix in tasks that are solved about half the time, give a larger rl.group_size, or start from "
        "demonstrations ([sft])",
        all_solved=_share(played) == 1.0,
    )
