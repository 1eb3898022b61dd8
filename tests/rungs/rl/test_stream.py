"""RL that plays while it trains: nothing too old, nothing lost or learned twice, whatever interrupts it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from interruptions import at_call, interrupt
from spine import digit_recipe, lines

from stepladder import ladder
from stepladder.environments.worlds.hidden_digit import HiddenDigitEnvironment, HiddenDigitWorld
from stepladder.errors import ConfigError, RunStopped
from stepladder.play.player import Player
from stepladder.run.progress import Display
from stepladder.rungs.rl import loop as rl
from stepladder.types import Message, Step, Task
from stepladder.workbench.bench import Workbench

ASYNC = (
    "run.exact=false",
    "run.checkpoint_every=2",
    "rl.off_policy.max_staleness=2",
    "rl.steps=8",
    "rl.tasks_per_step=3",
    "evaluation.raw=0",
    "environment.name=tests/rungs/rl/test_stream.py:Uneven",
)


class Uneven(HiddenDigitWorld):
    """Every seventh task takes its time."""

    def make(self) -> HiddenDigitEnvironment:
        return Dawdling()


class Dawdling(HiddenDigitEnvironment):
    inline = False
    _pause = 0.0

    async def reset(self, task: Task, *, seed: int) -> Any:
        self._pause = 0.15 if task.seed % 7 == 0 else 0.0
        return await super().reset(task, seed=seed)

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(self._pause)
        return await super().step(message)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def train(tmp_path: Path, *overrides: str) -> Path:
    return ladder.train(digit_recipe(tmp_path, "run", *ASYNC, *overrides), display=Display(quiet=True))


def learned(run: Path) -> list[str]:
    """Group ids in the order in which they were learned from; each with all its members."""
    counts = Counter(t["group_id"] for t in lines(run / "trajectories" / "rl.jsonl"))
    assert set(counts.values()) == {4}
    return list(counts)


def assert_whole(run: Path) -> None:
    """24 groups, each once: of the 30 first draws, since at most (S + 1) * 3 - 3 = 6 were begun in vain."""
    ids = learned(run)
    assert len(ids) == len(set(ids)) == 24
    draws = [int(group_id.split("-")[-1]) for group_id in ids]
    assert max(draws) < 30
    steps = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]
    assert [m["step"] for m in steps] == list(range(1, 9))
    assert max(m["version_lag_max"] for m in steps) <= 2


def test_a_run_learns_from_every_task_once_and_from_nothing_too_old(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert_whole(run)
    steps = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]
    assert any(m["version_lag_max"] >= 1 for m in steps)  # it did play ahead
    for m in steps:
        shares = [v for k, v in m.items() if k.startswith("version_lag/")]
        assert sum(shares) == pytest.approx(1.0)


class Crash(Exception):
    """What no code of ours catches."""


@pytest.mark.parametrize("call", [2, 5])
def test_a_crash_in_an_update_loses_no_group_and_learns_from_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    honest, count = rl.rl_update, 0

    def crashing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Crash
        return honest(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "rl_update", crashing)
        with pytest.raises(Crash):
            train(tmp_path)
    ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert_whole(tmp_path / "run")


def test_ctrl_c_keeps_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, count = rl.collect, 0

    def interrupted(parts: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            signal.raise_signal(signal.SIGINT)
        return honest(parts)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "collect", interrupted)
        with pytest.raises(RunStopped, match="rl step 3"):
            train(tmp_path)
    before = len([m for m in lines(tmp_path / "run" / "metrics.jsonl") if m["phase"] == "rl"])
    assert before == 3
    ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert_whole(tmp_path / "run")


EVERY = (*(f"train-{i}" for i in range(40)),)


@pytest.mark.parametrize("changed", ["max_staleness = 0", "max_staleness = 1", "dynamic_sampling = true"])
def test_a_smaller_bound_at_resume_loses_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    """40 tasks, one epoch, 9 of them begun when the run is stopped and its recipe edited: each is learned
    from (or, under dynamic sampling, looked at) exactly once, and none later than the new bound allows."""
    with monkeypatch.context() as patch:
        at_call(patch, rl, "collect", 4, interrupt, after=False)
        with pytest.raises(RunStopped, match="rl step 3"):
            train(tmp_path, "rl.tasks.epochs=1", "environment.options={ train = 40 }", "rl.steps=40")
    recipe = tmp_path / "run" / "recipe.toml"
    text, tasks = recipe.read_text(), "[rl.tasks]\n"
    assert "max_staleness = 2\n" in text
    assert tasks in text
    if changed.startswith("max"):
        text = text.replace("max_staleness = 2", changed)
    else:
        text = text.replace("max_staleness = 2", "max_staleness = 0").replace(tasks, f"{tasks}{changed}\n")
    recipe.write_text(text)
    with caplog.at_level("INFO", logger="stepladder"):
        ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert sorted(learned(tmp_path / "run")) == sorted(EVERY)
    steps = [m for m in lines(tmp_path / "run" / "metrics.jsonl") if m["phase"] == "rl"]
    for m in steps:
        assert m["tasks_drawn"] == m["tasks_trained"] + m["tasks_discarded"] + m["tasks_waiting"]
    assert steps[-1]["tasks_drawn"] == 40
    allowed = 1 if changed.endswith("1") else 0
    assert max(m["version_lag_max"] for m in steps[3:]) <= allowed
    assert "begun before the stop" in caplog.text


def test_finished_groups_of_the_present_weights_are_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun and finished after the last update is as the synchronous loop would play it now."""

    def waited(parts: Any) -> Any:
        """Stop when every group that may be begun is finished."""
        if parts.state.step == 3:
            runner, stream = parts.bench.runner, parts.stream
            while any(item.group is None for item in runner.call(stream.outstanding)):
                time.sleep(0.01)
            interrupt()
        return honest(parts)

    honest = rl.collect
    with monkeypatch.context() as patch:
        patch.setattr(rl, "collect", waited)
        with pytest.raises(RunStopped, match="rl step 3"):
            train(tmp_path)
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("max_staleness = 2\n", "max_staleness = 0\n"))
    asked: list[list[str]] = []

    def counted(self: Workbench, tasks: Any, **kwargs: Any) -> Any:
        asked.append([group_id for group_id, _ in tasks])
        return play(self, tasks, **kwargs)

    play = Workbench.play
    monkeypatch.setattr(Workbench, "play", counted)
    ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert asked[0] == []  # three groups of version 3 were finished: the first batch
    assert [len(ids) for ids in asked[1:]] == [3, 3, 3, 3]
    ids = learned(tmp_path / "run")
    assert len(ids) == len(set(ids)) == 24
    assert {int(i.split("-")[-1]) for i in ids} == set(range(24))  # six too old were played again, first


class Broken(Uneven):
    """One task of five has a bug in it."""

    def make(self) -> HiddenDigitEnvironment:
        return Buggy()


class Buggy(Dawdling):
    async def step(self, message: Message) -> Step:
        if self._task % 5 == 2:
            raise ZeroDivisionError("a bug")
        return await super().step(message)

    async def reset(self, task: Task, *, seed: int) -> Any:
        self._task = int(task.id.split("/")[1]) if task.split == "train" else -1
        return await super().reset(task, seed=seed)


def test_an_environment_that_raises_is_data_and_the_stream_goes_on(tmp_path: Path) -> None:
    """One task of five fails as a whole: counted, left out of training, never reward 0."""
    run = train(tmp_path, "environment.name=tests/rungs/rl/test_stream.py:Broken")
    assert_whole(run)
    played = lines(run / "trajectories" / "rl.jsonl")
    failed = [t for t in played if t["failure"]]
    assert failed
    assert all("ZeroDivisionError" in t["failure"]["message"] for t in failed)
    assert all(t["score"]["value"] is None for t in failed)
    steps = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]
    assert sum(m["failed"] for m in steps) == len(failed)


def test_an_error_of_ours_ends_the_run_at_once_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, count = Player.play, 0

    async def play(self: Player, *args: Any, key: str = "", **kwargs: Any) -> Any:
        nonlocal count
        count += key != ""  # the stream's own groups have one
        if count == 3:
            raise ZeroDivisionError("a bug")
        return await honest(self, *args, key=key, **kwargs)

    monkeypatch.setattr(Player, "play", play)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(tmp_path)


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.exact = false, or rl\.off_policy\.max_staleness = 0"):
        digit_recipe(tmp_path, "run", "rl.off_policy.max_staleness=1")
    with pytest.raises(ConfigError, match=r"dynamic_sampling = false, or rl.off_policy.max_staleness = 0"):
        digit_recipe(tmp_path, "run", "rl.off_policy.max_staleness=1", "run.exact=false", "rl.algorithm=dapo")
