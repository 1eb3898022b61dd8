"""From groups to a batch: rewards become advantages, trajectories become rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepladder.algorithms import Algorithm
from stepladder.objectives.advantages import constant_advantages, group_advantages
from stepladder.training.rl_step import RlBatch
from stepladder.types import Group, Trajectory


def make_batch(groups: Sequence[Group], row: Algorithm) -> RlBatch:
    """Rewards to advantages to rows. Failed and unscored trajectories take no part, and count for nothing.

    Neither do episodes in which the policy said nothing (no room for a single token). A group with fewer
    than two members left has no baseline and is left out.
    """
    trajectories: list[Trajectory] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        usable = [t for t in group.trajectories if _usable(t)]
        if len(usable) >= 2 or row.advantage == "constant":
            trajectories += usable
            group_of += [g] * len(usable)
    empty = torch.zeros(0)
    if not trajectories:
        return RlBatch([], empty, empty.long(), empty.long())
    rewards = torch.tensor([value_of(t) for t in trajectories], dtype=torch.float64)
    index = torch.tensor(group_of)
    if row.advantage == "constant":
        advantages = constant_advantages(rewards)
    else:
        advantages = group_advantages(rewards, index, baseline=row.baseline, scale=row.scale, ddof=row.ddof)
    samples, owner = [], []
    for i, trajectory in enumerate(trajectories):
        for sample in trajectory.samples:
            if sample.num_trained:
                samples.append(sample)
                owner.append(i)
    owners = torch.tensor(owner, dtype=torch.long)
    return RlBatch(samples, advantages.float()[owners], owners, index[owners])


def _usable(trajectory: Trajectory) -> bool:
    scored = trajectory.failure is None and trajectory.score.value is not None
    return scored and any(sample.num_trained for sample in trajectory.samples)


def value_of(trajectory: Trajectory) -> float:
    assert trajectory.score.value is not None
    return trajectory.score.value
