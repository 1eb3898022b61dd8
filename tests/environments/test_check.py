"""check_environment finds each broken promise, and finds none where there is none."""

import asyncio
import itertools
import random
import time

import pytest

from stepladder.environments.check import check_environment
from stepladder.environments.plain import PlainEnvironment
from stepladder.environments.tools import tool
from stepladder.types import Message, Reset, Step, Tool


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("calculator", {}),
        ("hidden_digit", {}),
        ("hidden_digit", {"plain": False}),
        ("examples/own_environment.py:Shop", {}),
    ],
)
def test_our_own_environments_keep_the_contract(target, options, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    report = check_environment(target, **options)
    assert report.ok, str(report)
    assert not [check for check in report.checks if check.status == "note"], str(report)
    assert str(report).endswith("keeps the contract.")
    assert 0 < report.seconds_per_episode < 0.1


class Sound:
    """An Environment class that keeps the contract; each test breaks one thing."""

    def reset(self, task, *, seed):
        self.task = task
        return Reset(task.messages, (Tool("use", "Use it.", {"type": "object", "properties": {}}),))

    def step(self, message):
        if message.tool_calls:
            return Step((Message("tool", "Error: not now"),))
        return Step(reward=float(message.text == self.task.reference), terminated=True)

    def close(self):
        pass

    @staticmethod
    def tasks(split):
        return [{"prompt": f"{split} {i}", "reference": str(i)} for i in range(5)]


class Crashes(Sound):
    def step(self, message):
        return Step(reward=len(message.text) / len(message.text), terminated=True)


class NoAnswer(Sound):
    def step(self, message):
        return Step() if message.tool_calls else super().step(message)


class Floods(Sound):
    def step(self, message):
        if message.tool_calls:
            return Step(tuple(Message("tool", "no") for _ in message.tool_calls))
        return super().step(message)


class GlobalRandom(Sound):
    def reset(self, task, *, seed):
        super().reset(task, seed=seed)
        return Reset((Message("user", str(random.random())),))


class Counts(Sound):
    counter = itertools.count()

    def reset(self, task, *, seed):
        super().reset(task, seed=seed)
        return Reset((Message("user", str(next(self.counter))),))


class Shared(Sound):
    seen: list = []  # noqa: RUF012  the fault under test

    def reset(self, task, *, seed):
        self.seen.clear()
        return super().reset(task, seed=seed)

    def step(self, message):
        self.seen.append(message)
        return Step((Message("tool", str(len(self.seen))),), terminated=len(self.seen) > 2)


class ClosesOnce(Sound):
    closed = False

    def close(self):
        if self.closed:
            raise OSError("already closed")
        self.closed = True


class CloseNeedsReset(Sound):
    def close(self):
        del self.task


class Hangs(Sound):
    def reset(self, task, *, seed):
        time.sleep(2.0)


class BadSchema(Sound):
    def reset(self, task, *, seed):
        self.task = task
        return Reset(task.messages, (Tool("use", "Use it.", {"type": "strng"}),))


class Overlaps(Sound):
    @staticmethod
    def tasks(split):
        return ["the same"]


class Empty(Sound):
    @staticmethod
    def tasks(split):
        return []


class Drifts(Sound):
    numbers = itertools.count()
    splits = staticmethod(lambda: ["train"])
    count = staticmethod(lambda split: 2)

    @classmethod
    def get(cls, split, i):
        return f"{next(cls.numbers)}"


class NotJson(Sound):
    @staticmethod
    def tasks(split):
        return [{"prompt": split, "board": {1, 2}}]


class SameId(Sound):
    @staticmethod
    def tasks(split):
        return [{"prompt": f"{split} {i}", "id": "one"} for i in range(3)]


class WrongReward(Sound):
    def step(self, message):
        return Step(reward="good", terminated=True)


@pytest.mark.parametrize(
    ("cls", "check", "text"),
    [
        (Crashes, "step accepts an empty message", "ZeroDivisionError"),
        (NoAnswer, "step accepts an unknown tool", "nothing answers the call"),
        (Floods, "step accepts a storm of calls", "100 calls got 100 messages"),
        (GlobalRandom, "same task and seed, same episode", "reset differs"),
        (Counts, "same task and seed, same episode", "reset differs"),
        (Shared, "instances share no state", "step 1 differs"),
        (ClosesOnce, "close can be called at any time", "already closed"),
        (CloseNeedsReset, "close can be called at any time", "AttributeError"),
        (Hangs, "reset gives opening messages", "gave no result within 0.5 s"),
        (BadSchema, "tools have valid schemas", "'strng'"),
        (Overlaps, "splits share no task", "is in 'train' too"),
        (Empty, "tasks can be listed", "no split has a task"),
        (Drifts, "tasks can be listed", "differs when asked for again"),
        (NotJson, "tasks can be listed", "not JSON serializable"),
        (SameId, "tasks can be listed", "two tasks have one id"),
        (WrongReward, "step accepts plain text", "returned 'good'"),
    ],
)
def test_each_broken_promise_is_found(cls, check, text):
    report = check_environment(cls, deadline=0.5)
    found = {failure.name: failure for failure in report.failures}
    assert check in found, str(report)
    assert text in found[check].detail
    assert not report.ok
    assert f"{cls.__name__} breaks the contract" in str(report)


def test_a_sound_class_passes():
    report = check_environment(Sound)
    assert report.ok, str(report)


def test_advice_and_places_are_given():
    report = str(check_environment(Crashes))
    assert f"raised at {__file__}:" in report
    assert "random.Random(seed)" in str(check_environment(GlobalRandom))


def test_what_is_no_environment_is_one_failure():
    report = check_environment(int)
    assert [check.status for check in report.checks] == ["fail"]
    assert "no method marked @tool" in str(report)
    assert not check_environment("no_such_module:X").ok


def test_remarks_do_not_fail():
    class Quiet:
        @tool
        def look(self, a: int) -> str:
            return "x"

        def reset(self, task):
            time.sleep(0)
            return "go"

        tasks = staticmethod(lambda: ["?"])

    report = check_environment(Quiet)
    assert report.ok, str(report)
    notes = {check.name for check in report.checks if check.status == "note"}
    assert notes == {"splits share no task", "tools have valid schemas", "an episode ends"}  # no reward


def test_a_hung_tool_and_a_mistake_in_a_tool_are_found():
    class Tools:
        @tool(deadline=0.05)
        def slow(self, a: int) -> str:
            """Hang."""
            time.sleep(0.5)

        def reward(self, answer):
            return 0.0

        tasks = staticmethod(lambda split: [split])

    class Wrong(Tools):
        @tool
        def slow(self, a: int) -> str:
            """Be wrong."""
            return a.upper()

    for cls, text in [(Tools, "hung"), (Wrong, "AttributeError")]:
        found = {failure.name: failure.detail for failure in check_environment(cls).failures}
        assert text in found["every tool can be called"]


def test_it_works_inside_a_running_event_loop():
    async def main():
        return check_environment(Sound)

    assert asyncio.run(main()).ok


def test_state_left_on_the_global_generator_is_restored():
    random.seed(5)
    before = random.getstate()
    check_environment(Sound)
    assert random.getstate() == before
    assert PlainEnvironment.inline
