"""Which episodes of a task are accepted, and why the others are not.

failed, cut, unscored, unsolved -> (statistical: not drawn) -> duplicate -> over the cap -> accepted
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stepladder.recipe.rejection_sampling import Selection
from stepladder.types import Group, Trajectory

Reason = Literal["accepted", "failed", "cut", "unscored", "unsolved", "not_drawn", "duplicate", "over_cap"]
REASONS: tuple[Reason, ...] = (
    "failed", "cut", "unscored", "unsolved", "not_drawn", "duplicate", "over_cap",
)  # fmt: skip
BETA = 0.5


@dataclass(slots=True)
class Seen:
    """What a round has accepted so far: contents, and how many of each task."""

    contents: set[str] = field(default_factory=set)
    tasks: Counter[str] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory) -> None:
        self.contents.add(content_key(trajectory))
        self.tasks[trajectory.task.id] += 1


def select(group: Group, selection: Selection, seen: Seen, *, seed: int) -> list[Reason]:
    """One reason for each trajectory of the group; what is accepted is added to `seen`.

    Contents are compared over the whole round, prompt included. The statistical draw comes before: an
    episode that was sampled twice has two chances to be in.
    """
    reasons: list[Reason] = [_ineligible(t, selection) or "over_cap" for t in group.trajectories]
    left = [i for i, reason in enumerate(reasons) if reason == "over_cap"]
    if selection.keep == "statistical" and left:
        drawn = statistical([_score(group.trajectories[i]) for i in left], selection.beta or BETA, seed=seed)
        for i, taken in zip(left, drawn, strict=True):
            if not taken:
                reasons[i] = "not_drawn"
        left = [i for i, taken in zip(left, drawn, strict=True) if taken]
    for i in _ranked(group.trajectories, left, selection):
        trajectory = group.trajectories[i]
        if content_key(trajectory) in seen.contents:
            reasons[i] = "duplicate"
        elif seen.tasks[group.task.id] < selection.cap:
            reasons[i] = "accepted"
            seen.add(trajectory)
    return reasons


def accepted(groups: Sequence[Group], selected: Sequence[Sequence[Reason]]) -> list[Trajectory]:
    """The trajectories whose reason is "accepted"."""
    return [
        trajectory
        for group, reasons in zip(groups, selected, strict=True)
        for trajectory, reason in zip(group.trajectories, reasons, strict=True)
        if reason == "accepted"
    ]


def statistical(scores: Sequence[float], beta: float, *, seed: int) -> list[bool]:
    """Statistical rejection sampling: accept each with probability exp((r − r_max)/β) (arXiv:2309.06657).

    Then what is accepted is distributed as policy·exp(r/β)/Z, as far as r_max is the largest possible score.
    The paper goes over the rejected again until it has enough of them; here it is one pass, so that the
    draws stay independent.

    >>> statistical([2.0, 2.0], 0.5, seed=0)  # the best is always accepted
    [True, True]
    """
    best = max(scores)
    rng = random.Random(f"{seed}/statistical")
    return [rng.random() < math.exp((score - best) / beta) for score in scores]


def best_and_worst(group: Group, selection: Selection) -> tuple[Trajectory, Trajectory] | None:
    """The best and the worst episode of a task, where their scores differ; None where nothing is preferred.

    The better one must be acceptable; both must have ended by themselves.
    """
    whole = [
        t for t in group.trajectories if t.failure is None and t.score.value is not None and not cut_off(t)
    ]
    good = [t for t in whole if _ineligible(t, selection) is None]
    if not good:
        return None
    best, worst = max(good, key=_score), min(whole, key=_score)
    return (best, worst) if _score(best) > _score(worst) else None


def cut_off(trajectory: Trajectory) -> bool:
    """Ended in the middle of a message: what would be learned is to stop nowhere."""
    return trajectory.stop_reason in ("length", "context")


def content_key(trajectory: Trajectory) -> str:
    """Equal for episodes in which the same was said, whatever tokens it was said in."""
    said = [
        [m.role, m.text, m.reasoning, [[c.name, dict(c.arguments), c.error] for c in m.tool_calls]]
        for m in trajectory.messages
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()


def _ineligible(trajectory: Trajectory, selection: Selection) -> Reason | None:
    if trajectory.failure is not None:
        return "failed"
    if cut_off(trajectory):
        return "cut"
    needs_score = selection.required == "scored" or selection.keep in ("best", "statistical")
    if needs_score and trajectory.score.value is None:
        return "unscored"
    if selection.required == "solved" and not trajectory.solved:
        return "unsolved"
    return None


def _ranked(trajectories: Sequence[Trajectory], left: Sequence[int], selection: Selection) -> list[int]:
    """`left` in the order of preference; equals stay in the order they were sampled."""
    if selection.keep == "best":
        return sorted(left, key=lambda i: -_score(trajectories[i]))
    if selection.keep == "shortest":
        return sorted(left, key=lambda i: _length(trajectories[i]))
    return list(left)


def _length(trajectory: Trajectory) -> int:
    """Sampled tokens; of an endpoint, which tells none, the characters that the model said."""
    said = sum(len(m.text) for m in trajectory.messages if m.role == "assistant")
    return trajectory.num_sampled_tokens or said


def _score(trajectory: Trajectory) -> float:
    assert trajectory.score.value is not None
    return trajectory.score.value
