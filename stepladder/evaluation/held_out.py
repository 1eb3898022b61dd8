"""Held-out evaluation: the same rollout as in training, other tasks, other temperature, intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.evaluation.answers import answer_of
from stepladder.evaluation.curves import curve
from stepladder.evaluation.result import Evaluation, Sample, TaskSamples
from stepladder.play.agent import Agents
from stepladder.play.player import Player
from stepladder.play.rollout import Progress
from stepladder.rewards.reward import Reward, score_group
from stepladder.types import Group, Task, Trajectory

Answer = Callable[[Trajectory], str | None]


def held_out(world: CheckedWorld, split: str, n: int) -> list[Task]:
    """Return the first `n` tasks of a split. Raises ConfigError where there are fewer."""
    world.require(split, n)
    return [world.get(split, i) for i in range(n)]


async def evaluate(
    player: Player,
    tasks: Sequence[Task],
    *,
    samples: int = 1,
    temperature: float,
    seed: int,
    agents: Agents | None = None,
    answer: Answer = answer_of,
    reward: Reward | None = None,
    on_trajectory: Progress | None = None,
) -> Evaluation:
    """Play every task `samples` times and count: each stays in the denominator, whatever happened to it.

    `answer` reads what votes are counted by, and `reward` gives the score that best-of-n and weighted votes
    go by; see `evaluation.curves`.
    """
    if not tasks:
        raise ConfigError("an evaluation needs at least one task; got none")
    started = time.monotonic()
    groups = await play_held_out(
        player,
        tasks,
        n=samples,
        temperature=temperature,
        seed=seed,
        agents=agents,
        on_trajectory=on_trajectory,
    )
    read = [await _read(group, answer, reward) for group in groups]
    mean = curve(read, "pass", [1], seed=seed).at(1)
    return Evaluation(
        tasks=tuple(read),
        trajectories=tuple(t for group in groups for t in group.trajectories),
        interval=(mean.low, mean.high),
        temperature=temperature,
        seconds=time.monotonic() - started,
    )


async def play_held_out(
    player: Player,
    tasks: Sequence[Task],
    *,
    n: int = 1,
    temperature: float,
    seed: int,
    agents: Agents | None = None,
    on_trajectory: Progress | None = None,
) -> list[Group]:
    """Play `n` episodes of every task. One that failed is played once more; either way it is in its group."""
    options: dict[str, Any] = {"temperature": temperature, "seed": seed, "agents": agents}
    named = [(f"eval-0-{task.id}", task) for task in tasks]
    groups = await player.play(named, group_size=n, on_trajectory=on_trajectory, **options)
    again = [(g, i) for g, group in enumerate(groups) for i, t in enumerate(group.trajectories) if t.failure]
    if again:
        pending = [(f"eval-1-{groups[g].task.id}" + f"-{i}" * (i > 0), groups[g].task) for g, i in again]
        retried = await player.play(pending, on_trajectory=on_trajectory, **options)
        for (g, i), group in zip(again, retried, strict=True):
            whole = list(groups[g].trajectories)
            whole[i] = group.trajectories[0]
            groups[g] = replace(groups[g], trajectories=tuple(whole))
    return groups


async def _read(group: Group, answer: Answer, reward: Reward | None) -> TaskSamples:
    """Return the episodes of a task as numbers. The reward is not added to the environment's success."""
    scores: list[float | None] = [None] * len(group.trajectories)
    if reward is not None:
        scored = await score_group(group, [reward], environment_weight=0.0)
        scores = [t.score.value for t in scored.trajectories]
    samples = [
        Sample(
            solved=t.solved,
            answer=None if t.failure is not None or t.truncated else answer(t),
            score=score,
            tokens=t.num_sampled_tokens,
            failed=t.failure is not None,
            truncated=t.truncated,
            used_tool=t.used_tool,
        )
        for t, score in zip(group.trajectories, scores, strict=True)
    ]
    return TaskSamples(group.task.id, group.task.domain, tuple(samples))
