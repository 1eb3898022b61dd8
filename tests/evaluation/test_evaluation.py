"""Counting: intervals by hand, failures in the denominator, retries, what success means."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.environments.checked import CheckedWorld
from stepladder.environments.environment import as_world
from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation, WithExamples, evaluate, held_out
from stepladder.play.agent import Act, Record
from stepladder.play.player import Player
from stepladder.play.rollout import Limits, with_success
from stepladder.reports.tables import wilson_interval
from stepladder.types import Failure, Group, Message, Reset, Score, Step, Task, ToolCall, Trajectory


def trajectory(
    value: float | None = 0.0,
    *,
    parts: dict[str, float | None] | None = None,
    failure: Failure | None = None,
    info: dict[str, Any] | None = None,
    domain: str = "d",
    stop: Any = "terminated",
    calls: tuple[ToolCall, ...] = (),
) -> Trajectory:
    return Trajectory(
        id="t",
        group_id="g",
        task=Task("0", "test", domain),
        turns=(),
        messages=(Message("user", "?"), Message("assistant", "", tool_calls=calls)),
        rewards=(value,),
        score=Score(value, parts or {}),
        stop_reason=stop,
        failure=failure,
        info=info or {},
    )


BROKEN = Failure("environment", "EnvironmentFault", "it broke")


def test_wilson_by_hand() -> None:
    """p = .5, n = 4, z^2 = 3.841459: centre (.5 + 3.841459/8)/(1 + 3.841459/4) = .9801824/1.9603648 = .5;
    half z * sqrt(.25/4 + 3.841459/64)/1.9603648 = 1.959964 * sqrt(.1225228)/1.9603648 = .3499608."""
    low, high = wilson_interval(2, 4)
    assert low == pytest.approx(0.5 - 0.34996, abs=1e-5)
    assert high == pytest.approx(0.5 + 0.34996, abs=1e-5)


def test_wilson_at_the_ends_by_hand() -> None:
    """None of 10: the lower end is 0, the upper z^2/(n + z^2) = 3.841459/13.841459 = .2775328."""
    low, high = wilson_interval(0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.2775328, abs=1e-6)
    low, high = wilson_interval(10, 10)
    assert low == pytest.approx(1 - 0.2775328, abs=1e-6)
    assert high == 1.0


@given(n=st.integers(1, 300), data=st.data())
def test_wilson_holds_the_share_and_is_symmetric(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = wilson_interval(n - k, n)
    assert mirrored == (pytest.approx(1 - high, abs=1e-12), pytest.approx(1 - low, abs=1e-12))


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_impossible_counts_are_refused(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="got"):
        wilson_interval(k, n)


class Known:
    """A player of whose tasks the episodes are known."""

    async def play(self, tasks: Sequence[tuple[str, Task]], **options: Any) -> list[Group]:
        return [Group(name, task, (task.data["episode"],)) for name, task in tasks]


def counted(played: Sequence[Trajectory]) -> Evaluation:
    tasks = [Task(str(i), "test", t.task.domain, data={"episode": t}) for i, t in enumerate(played)]
    player: Any = Known()
    return asyncio.run(evaluate(player, tasks, temperature=0.0, seed=0))


def test_ten_tasks_three_crashes_seven_right_is_seventy_percent() -> None:
    """Fault 116: failures stay in the denominator."""
    played = [trajectory(1.0)] * 7 + [trajectory(None, failure=BROKEN)] * 3
    result = counted(played)
    assert (result.n, result.solved, result.failed) == (10, 7, 3)
    assert result.success == 0.7
    assert result.interval == wilson_interval(7, 10)


def test_families_truncation_and_tools_are_counted_per_episode() -> None:
    good, bad = ToolCall("add", {"a": 1}), ToolCall("", {}, error="no JSON")
    played = [
        trajectory(1.0, domain="a", calls=(good, good)),  # two calls, one episode
        trajectory(0.0, domain="a", calls=(bad,)),
        trajectory(0.0, domain="b", stop="length"),
        trajectory(None, domain="b", failure=BROKEN, stop="failed"),
    ]
    result = counted(played)
    assert result.by_domain == {"a": (1, 2), "b": (0, 2)}
    assert result.tool_rate == 0.25
    assert result.truncated == 1
    assert played[0].used_tool
    assert not played[1].used_tool


@pytest.mark.parametrize(
    ("what", "right"),
    [
        (trajectory(1.0), True),
        (trajectory(0.99), False),
        (trajectory(1.15, parts={"correct": 0.0, "searched": 1.15}), False),  # the part decides
        (trajectory(0.15, parts={"correct": 1.0, "cost": -0.85}), True),
        (trajectory(0.0, info={"success": True}), True),
        (trajectory(5.0, info={"success": False}), False),
        (trajectory(None), False),
        (trajectory(1.0, parts={"correct": None}), True),
        (trajectory(1.0, failure=BROKEN, info={"success": True}), False),
    ],
)
def test_what_success_is(what: Trajectory, right: bool) -> None:
    assert with_success(what).solved is right


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        counted([])


class Fragile:
    """Task i fails its first `fails[i]` resets; it is solved otherwise."""

    inline = True
    resets: ClassVar[Counter[str]] = Counter()
    tasks = staticmethod(lambda split: [{"prompt": "?", "fails": (0, 1, 2)[i % 3]} for i in range(6)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.resets[task.id] += 1
        if self.resets[task.id] <= task.data["fails"]:
            raise OSError("the sandbox is gone")
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        return Step(reward=1.0, terminated=True)


class Talker:
    """An agent that says "yes"."""

    def __init__(self, key: str) -> None:
        self.seen: list[Message] = []

    def begin(self, messages: Any, tools: Any) -> None:
        self.seen = list(messages)

    async def act(self, seed: int) -> Act:
        return Act(Message("assistant", "yes"), "stop")

    def observe(self, messages: Any) -> None:
        self.seen += messages

    def record(self, trajectory_id: str, group_id: str) -> Record:
        return Record(tuple(self.seen))

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        return text[:max_tokens], len(text)

    def close(self) -> None:
        pass


def talking(world: CheckedWorld) -> Player:
    return Player(lambda temperature: Talker, world, Limits(), None, 0.0)


def test_a_failed_episode_is_played_again_once_then_counts_as_unsolved() -> None:
    """Six tasks: two work, two work the second time, two fail twice: 4 of 6, 2 failed."""
    Fragile.resets.clear()
    world = as_world(Fragile)
    tasks = held_out(world, "test", 6)
    result = asyncio.run(evaluate(talking(world), tasks, temperature=0.0, seed=0))
    assert (result.n, result.solved, result.failed) == (6, 4, 2)
    assert sorted(Fragile.resets.values()) == [1, 1, 2, 2, 2, 2]
    assert [t.task.id for t in result.trajectories] == [task.id for task in tasks]
    assert {t.failure.boundary for t in result.trajectories if t.failure} == {"environment"}


def test_too_few_or_unknown_held_out_tasks_are_refused() -> None:
    world = as_world(Fragile)
    with pytest.raises(ConfigError, match="6 tasks, 7 were asked for; try tasks = 6"):
        held_out(world, "test", 7)
    with pytest.raises(ConfigError, match="Did you mean 'test'"):
        held_out(world, "tset", 1)


def test_worked_examples_stand_before_the_task_and_after_the_system_message() -> None:
    class Spoken:
        inline = True
        tasks = staticmethod(
            lambda split: [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}]
        )

        async def reset(self, task: Task, *, seed: int) -> Reset:
            return Reset(task.messages)

        async def step(self, message: Message) -> Step:
            return Step(terminated=True)

    example = [Message("system", "s"), Message("user", "e"), Message("assistant", "a")]
    world: CheckedWorld = WithExamples(as_world(Spoken), [example, example])
    task = world.get("test", 0)
    result = asyncio.run(evaluate(talking(world), [task], temperature=0.0, seed=0))
    opening = [m.text for m in result.trajectories[0].messages]
    assert opening == ["s", "e", "a", "e", "a", "q"]
