"""Reinforcement learning while it plays: the stream of groups of a run, and its part of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepladder.recipe.rl import RlSection
from stepladder.run.records import task_from_dict, task_to_dict, trajectory_from_dict, trajectory_to_dict
from stepladder.rungs.rl.group_stream import Begun, GroupStream, Outstanding
from stepladder.rungs.tasks import TaskSampler
from stepladder.types import Group, Task, Trajectory
from stepladder.workbench.bench import Workbench

log = logging.getLogger("stepladder")


def open_stream(
    bench: Workbench,
    sampler: TaskSampler,
    settings: RlSection,
    *,
    step: int,
    seed: int,
    max_turns: Callable[[], int],
    waiting: Sequence[Mapping[str, Any]] = (),
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> GroupStream:
    """A stream at the learner's `step`, going on with what a checkpoint had `waiting`.

    `max_turns` is asked at the start of each group, since the horizon may grow.
    """

    def draw() -> tuple[str, Task] | None:
        return next(iter(sampler.next(1)), None)

    async def play(group_id: str, task: Task, order: int) -> Group:
        (group,) = await bench.player.play(
            [(group_id, task)],
            group_size=settings.group_size,
            max_turns=max_turns(),
            seed=seed,
            key=f"{order:08d}-",
            on_trajectory=on_trajectory,
        )
        return group

    def make() -> GroupStream:
        stream = GroupStream(
            draw,
            play,
            per_step=settings.tasks_per_step,
            max_staleness=settings.off_policy.max_staleness,
            at_once=max(1, bench.limits.concurrency // settings.group_size),
            version=step,
        )
        say_begun(len(waiting), stream.restore([_from_dict(record) for record in waiting]))
        return stream

    return bench.runner.call(make)


def put_back(sampler: TaskSampler, waiting: Sequence[Mapping[str, Any]], *, step: int) -> dict[str, Group]:
    """For a loop that does not play ahead, after one that did: the tasks of its checkpoint become the next.

    Returns, by id, the finished groups that the weights of `step` sampled: the next batch may have them as
    they are. They come first, because one update later they are too old.
    """
    begun = [_from_dict(record) for record in waiting]
    fresh = {group_id: g for group_id, _, born, g in begun if g is not None and born == step}
    begun.sort(key=lambda item: item[0] not in fresh)
    sampler.put_back([(group_id, task) for group_id, task, _, _ in begun])
    say_begun(len(begun), len(fresh))
    return fresh


def say_begun(begun: int, kept: int) -> None:
    """What becomes of the groups that a checkpoint holds."""
    if begun:
        log.info(
            "%d groups were begun before the stop: %d are finished and new enough to be trained on, %d are "
            "played again",
            begun,
            kept,
            begun - kept,
        )


def stream_state(bench: Workbench, stream: GroupStream) -> list[dict[str, Any]]:
    """What is begun and not learned from, for a checkpoint; finished groups with their tokens."""
    return [_to_dict(item) for item in bench.runner.call(stream.outstanding)]


def close_stream(bench: Workbench, stream: GroupStream) -> None:
    """Cancel what is being played; every environment and session is closed when this returns."""
    bench.runner.run(stream.close())


def _to_dict(item: Outstanding) -> dict[str, Any]:
    group = item.group
    if group is not None and all(t.failure for t in group.trajectories):
        group = None  # what a dead service or engine left would stop a resumed run again: it is played anew
    return {
        "group_id": item.group_id,
        "task": task_to_dict(item.task),
        "born": item.born,
        "trajectories": group and [trajectory_to_dict(t, samples=True) for t in group.trajectories],
    }


def _from_dict(record: Mapping[str, Any]) -> Begun:
    task, played = task_from_dict(record["task"]), record["trajectories"]
    group = None
    if played is not None:
        group = Group(record["group_id"], task, tuple(trajectory_from_dict(t) for t in played))
    return record["group_id"], task, record["born"], group
