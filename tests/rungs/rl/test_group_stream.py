"""The bounded queue between players and learner: nobody starves, nothing is lost, nothing is too old."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.errors import ConfigError
from stepladder.rungs.rl.group_stream import GroupStream
from stepladder.types import Group, Message, Task


def task(i: int) -> Task:
    return Task(id=str(i), split="train", messages=(Message("user", "?"),), seed=i)


class World:
    """Groups that take as long as they are told, in turns of a clock that the test advances."""

    def __init__(self, durations: list[int], *, broken: int | None = None) -> None:
        self.durations, self.broken = durations, broken
        self.drawn = 0
        self.now = 0
        self.playing = 0
        self.most = 0
        self.born: dict[str, int] = {}
        self.stream: GroupStream | None = None

    def draw(self) -> tuple[str, Task] | None:
        if self.drawn == len(self.durations):
            return None
        self.drawn += 1
        return str(self.drawn - 1), task(self.drawn - 1)

    async def play(self, group_id: str, task: Task, order: int) -> Group:
        assert self.stream is not None
        self.born[group_id] = self.stream.version
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            until = self.now + self.durations[int(task.id)]
            while self.now < until:
                await asyncio.sleep(0)
            if self.broken == int(task.id):
                raise ZeroDivisionError("a bug")
            return Group(group_id, task, ())
        finally:
            self.playing -= 1


async def learn(world: World, stream: GroupStream, steps: int | None = None) -> list[list[tuple[str, int]]]:
    """[(group id, updates since it was begun)] of every step; the clock runs while the learner waits."""
    world.stream = stream
    seen: list[list[tuple[str, int]]] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            world.now += 1

    clock = asyncio.ensure_future(tick())
    try:
        while steps is None or len(seen) < steps:
            groups = await stream.take()
            if not groups:
                break
            seen.append([(g.id, stream.version - world.born[g.id]) for g in groups])
            stream.advance()
    finally:
        clock.cancel()
    return seen


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def _everything(world: World, per_step: int, staleness: int, at_once: int) -> Any:
    stream = GroupStream(world.draw, world.play, per_step=per_step, max_staleness=staleness, at_once=at_once)
    return await learn(world, stream)


@settings(max_examples=150, deadline=None)
@given(
    durations=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    per_step=st.integers(1, 5),
    staleness=st.integers(0, 4),
    at_once=st.integers(1, 30),
)
def test_each_group_is_learned_from_once_and_none_is_too_old(
    durations: list[int], per_step: int, staleness: int, at_once: int
) -> None:
    world = World(durations)
    seen = run(_everything(world, per_step, staleness, at_once))
    ids = [group_id for step in seen for group_id, _ in step]
    assert sorted(ids, key=int) == [str(i) for i in range(len(durations))]
    assert max(lag for step in seen for _, lag in step) <= staleness
    assert all(len(step) == per_step for step in seen[:-1])
    assert world.most <= at_once


def test_staleness_zero_is_the_synchronous_loop() -> None:
    """Steps are 0 1 2, 3 4 5: a step waits for its slowest, and nothing of the next one has begun."""
    seen = run(_everything(World([9, 1, 5, 1, 9, 1]), 3, 0, 100))
    assert [sorted(g for g, _ in step) for step in seen] == [["0", "1", "2"], ["3", "4", "5"]]
    assert all(lag == 0 for step in seen for _, lag in step)


def test_a_slow_task_is_overtaken_but_comes_in_time() -> None:
    """S = 2, one group a step: 0 takes 30 ticks, the others 1. It may be overtaken twice, not three times."""
    seen = run(_everything(World([30, 1, 1, 1, 1, 1]), 1, 2, 100))
    assert [step[0][0] for step in seen] == ["1", "2", "0", "3", "4", "5"]
    assert [step[0][1] for step in seen][:3] == [0, 1, 2]


def test_a_bug_is_raised_at_once_and_the_others_are_cancelled() -> None:
    world = World([1, 10_000_000, 10_000_000], broken=0)

    async def work() -> None:
        stream = GroupStream(world.draw, world.play, per_step=3, max_staleness=0, at_once=9)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await learn(world, stream)
        assert world.playing == 0

    run(work())


def test_what_was_outstanding_is_played_again_after_a_kill_and_nothing_twice() -> None:
    """Two steps of 2 with S = 1; then the stream is thrown away and a new one takes over its list."""

    async def work() -> list[str]:
        world = World([1, 1, 1, 1, 50, 1, 1, 1, 1, 1])
        first = GroupStream(world.draw, world.play, per_step=2, max_staleness=1, at_once=9)
        seen = await learn(world, first, steps=2)
        waiting = [(o.group_id, o.task, o.born, o.group) for o in first.outstanding()]
        assert len(waiting) == 4
        await first.close()
        second = GroupStream(world.draw, world.play, per_step=2, max_staleness=1, at_once=9, version=2)
        second.restore(waiting)
        seen += await learn(world, second)
        return [group_id for step in seen for group_id, _ in step]

    assert sorted(run(work()), key=int) == [str(i) for i in range(10)]


def test_close_ends_what_is_being_played() -> None:
    async def work() -> None:
        world = World([10_000_000] * 4)
        stream = GroupStream(world.draw, world.play, per_step=2, max_staleness=1, at_once=3)
        world.stream = stream
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0.01)
        assert world.playing == 3
        waiting.cancel()
        await stream.close()
        await stream.close()
        assert world.playing == 0

    run(work())


def test_numbers_that_mean_nothing_are_refused() -> None:
    world = World([])
    with pytest.raises(ConfigError, match="per_step >= 1"):
        GroupStream(world.draw, world.play, per_step=0, max_staleness=1, at_once=1)


def test_a_job_that_something_else_cancels_is_an_error_and_no_group_to_wait_for() -> None:
    world = World([1, 10_000_000, 10_000_000])
    honest = world.play

    async def play(group_id: str, task: Task, order: int) -> Group:
        if group_id == "0":
            raise asyncio.CancelledError
        return await honest(group_id, task, order)

    async def work() -> None:
        stream = GroupStream(world.draw, play, per_step=3, max_staleness=0, at_once=9)
        with pytest.raises(
            RuntimeError, match="plays group '0' was cancelled by code that is not stepladder's"
        ):
            await learn(world, stream)
        assert world.playing == 0

    run(work())


def test_the_end_of_the_data_is_a_shorter_step_and_then_none() -> None:
    async def work() -> list[int]:
        world = World([1] * 7)
        stream = GroupStream(world.draw, world.play, per_step=3, max_staleness=2, at_once=9)
        sizes = [len(step) for step in await learn(world, stream)]
        assert await stream.take() == []
        assert stream.outstanding() == []
        return sizes

    assert run(work()) == [3, 3, 1]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    before=st.tuples(st.integers(1, 6), st.integers(0, 3)),
    after=st.tuples(st.integers(1, 6), st.integers(0, 3)),
    finished=st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_a_stream_restored_under_other_bounds_keeps_them(
    before: tuple[int, int], after: tuple[int, int], finished: list[bool]
) -> None:
    """A resumed run follows its edited recipe: with a smaller max_staleness or tasks_per_step what was begun
    is more than may be outstanding. Nothing hangs, nothing is too old, each task comes once."""
    world = World([1] * 40)

    async def go() -> None:
        first = GroupStream(world.draw, world.play, per_step=before[0], max_staleness=before[1], at_once=50)
        handed = [group_id for step in await learn(world, first, steps=3) for group_id, _ in step]
        await asyncio.sleep(0)
        waiting = [
            (item.group_id, item.task, item.born, Group(item.group_id, item.task, ()) if done else None)
            for item, done in zip(first.outstanding(), finished, strict=False)
        ]
        born = {group_id: version for group_id, _, version, _ in waiting}
        await first.close()
        second = GroupStream(
            world.draw,
            world.play,
            per_step=after[0],
            max_staleness=after[1],
            at_once=50,
            version=first.version,
        )
        second.restore(waiting)
        world.born = born
        steps = await asyncio.wait_for(learn(world, second), 5)
        await second.close()
        assert max((lag for step in steps for _, lag in step), default=0) <= after[1]
        assert sorted(handed + [i for step in steps for i, _ in step], key=int) == [str(i) for i in range(40)]

    asyncio.run(go())


def test_a_job_that_ends_during_an_update_lets_none_begin_too_early() -> None:
    """Seen as a hang of a resumed run: 3 groups a step before, 2 now, S = 3. While the learner updates, what
    it was handed is still in the way of what waits: a group begun then would be too old at its turn."""
    world = World([1] * 30)

    async def go() -> None:
        stream = GroupStream(world.draw, world.play, per_step=2, max_staleness=3, at_once=50, version=4)
        world.stream = stream
        drawn = [world.draw() for _ in range(12)]
        ages = {6: 3, 7: 3, 9: 4, 10: 4}  # finished before the checkpoint, begun at these versions
        stream.restore(
            [
                (i, t, ages.get(int(i), 4), Group(i, t, ()) if int(i) in ages else None)
                for i, t in (pair for pair in drawn if pair is not None)
            ]
        )
        world.born = {str(i): born for i, born in ages.items()}
        for _ in range(12):
            groups = await asyncio.wait_for(_clocked(world, stream), 5)
            assert all(stream.version - world.born[g.id] <= 3 for g in groups)
            world.now += 1
            for _ in range(4):  # the update: jobs end meanwhile
                await asyncio.sleep(0)
            stream.advance()
        await stream.close()

    asyncio.run(go())


async def _clocked(world: World, stream: GroupStream) -> list[Group]:
    """`take` while the clock runs."""
    job = asyncio.ensure_future(stream.take())
    while not job.done():
        await asyncio.sleep(0)
        world.now += 1
    return job.result()
