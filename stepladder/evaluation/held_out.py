"""Held-out evaluation: the same rollout as in training, other tasks, other temperature, intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepladder.environments.checked import CheckedEnvironment, CheckedWorld
from stepladder.errors import ConfigError
from stepladder.play.agent import Agents
from stepladder.play.player import Player
from stepladder.play.rollout import Progress
from stepladder.reports.tables import wilson_interval
from stepladder.types import Group, Message, Reset, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success on `n` tasks. Failed episodes were retried once, then count as unsolved and are counted.

    `interval` is the 95 % Wilson score interval of the success rate.
    """

    n: int
    solved: int
    interval: tuple[float, float]
    tool_rate: float
    mean_tokens: float
    failed: int
    truncated: int
    by_domain: dict[str, tuple[int, int]]  # domain: (solved, n)
    seconds: float
    temperature: float
    trajectories: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        return self.solved / self.n


def held_out(world: CheckedWorld, split: str, n: int) -> list[Task]:
    """The first `n` tasks of a split. Raises ConfigError where there are fewer."""
    world.require(split, n)
    return [world.get(split, i) for i in range(n)]


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


async def evaluate(
    player: Player,
    tasks: Sequence[Task],
    *,
    temperature: float,
    seed: int,
    on_trajectory: Progress | None = None,
) -> Evaluation:
    """Play every task once and count. Every task stays in the denominator, whatever happened to it."""
    started = time.monotonic()
    groups = await play_held_out(
        player, tasks, temperature=temperature, seed=seed, on_trajectory=on_trajectory
    )
    played = [group.trajectories[0] for group in groups]
    return summarise(played, temperature, time.monotonic() - started)


def summarise(played: Sequence[Trajectory], temperature: float, seconds: float) -> Evaluation:
    """Counts over finished trajectories."""
    if not played:
        raise ConfigError("an evaluation needs at least one task; got none")
    by_domain: dict[str, tuple[int, int]] = {}
    for t in played:
        right, n = by_domain.get(t.task.domain, (0, 0))
        by_domain[t.task.domain] = (right + t.solved, n + 1)
    total = sum(t.solved for t in played)
    return Evaluation(
        n=len(played),
        solved=total,
        interval=wilson_interval(total, len(played)),
        tool_rate=sum(t.used_tool for t in played) / len(played),
        mean_tokens=sum(t.num_sampled_tokens for t in played) / len(played),
        failed=sum(t.failure is not None for t in played),
        truncated=sum(t.truncated for t in played),
        by_domain=dict(sorted(by_domain.items())),
        seconds=seconds,
        temperature=temperature,
        trajectories=tuple(played),
    )


class WithExamples(CheckedWorld):
    """A world whose every prompt is preceded by worked examples: is training needed at all?"""

    def __init__(self, world: CheckedWorld, examples: Sequence[Sequence[Message]]) -> None:
        super().__init__(world.inner, world.deadline)
        self.examples = [m for example in examples for m in example if m.role != "system"]

    def make(self) -> CheckedEnvironment:
        return _ExampleEnvironment(super().make(), self.examples)


class _ExampleEnvironment(CheckedEnvironment):
    def __init__(self, environment: CheckedEnvironment, examples: list[Message]) -> None:
        super().__init__(environment.inner, environment.name, environment._deadline)
        self.examples = examples

    async def reset(self, task: Task, *, seed: int) -> Reset:
        reset = await super().reset(task, seed=seed)
        head = [m for m in reset.messages[:1] if m.role == "system"]
        rest = reset.messages[len(head) :]
        return replace(reset, messages=(*head, *self.examples, *rest))
