"""Parts of a run die, hang or end, in both loops: it ends within seconds with the cause, or it is data."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from interruptions import at_call
from service import Service
from spine import digit_recipe, lines

from stepladder import ladder
from stepladder.engines.local.scheduler import Scheduler
from stepladder.errors import DataError, EnvironmentFault, InvariantError, RunStopped
from stepladder.run.progress import Display
from stepladder.rungs.rl import loop as rl
from stepladder.workbench.bench import Workbench

SMALL = (
    "run.exact=false",
    "run.checkpoint_every=1",
    "rl.steps=6",
    "rl.tasks_per_step=3",
    "sft.epochs=1",
    "evaluation.raw=0",
    "evaluation.tasks=2",
)
both = pytest.mark.parametrize("staleness", [0, 2], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


def train(tmp_path: Path, world: str, staleness: int, *overrides: str) -> Path:
    name = f"environment.name=tests/helpers/fault_worlds.py:{world}"
    given = (*SMALL, name, f"rl.off_policy.max_staleness={staleness}", *overrides)
    return ladder.train(digit_recipe(tmp_path, "run", *given), display=Display(quiet=True))


def resume(tmp_path: Path) -> Path:
    return ladder.resume(tmp_path / "run", display=Display(quiet=True))


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]


def assert_each_once(run: Path, steps: int = 6) -> None:
    """Every task in a step is there once, with its siblings; the log accounts for every task drawn."""
    counts = Counter(t["group_id"] for t in lines(run / "trajectories" / "rl.jsonl"))
    assert set(counts.values()) == {4}
    logged = steps_of(run)
    assert [m["step"] for m in logged] == list(range(1, steps + 1))
    for m in logged:
        assert m["tasks_drawn"] == m["tasks_trained"] + m["tasks_discarded"] + m["tasks_waiting"]
    end = logged[-1]
    assert end["tasks_trained"] + end["tasks_discarded"] == len(counts)
    begun = {f"train-{k}" for k in range(int(end["tasks_drawn"]))}
    assert set(counts) <= begun
    assert len(begun - set(counts)) == end["tasks_waiting"]


def assert_failures_are_data(run: Path, says: str) -> None:
    """Counted apart, without a score: never reward 0."""
    failed = [t for t in lines(run / "trajectories" / "rl.jsonl") if t["failure"]]
    assert failed
    assert all(says in t["failure"]["message"] and t["score"]["value"] is None for t in failed)
    assert sum(m["failed"] for m in steps_of(run)) == len(failed)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# -- the environment's service -------------------------------------------------------------------------------


@both
def test_a_killed_service_stops_the_run_with_its_reason_and_a_resumed_run_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    service = Service()
    try:
        with monkeypatch.context() as patch:
            at_call(patch, rl, "collect", 3, service.kill, after=False)
            says = r"all 12 episodes of this step failed; the first at the environment: .*Connection refused"
            with pytest.raises(EnvironmentFault, match=rf"(?s){says}.*stepladder resume"), within(60):
                train(tmp_path, "Served", staleness, f"environment.options={{ url = '{service.url}' }}")
        run = tmp_path / "run"
        assert len(steps_of(run)) >= 2
        assert all(m["episodes"] > m["failed"] for m in steps_of(run))
        service.start()
        assert_each_once(resume(tmp_path))
    finally:
        service.kill()


def test_a_service_that_comes_back_costs_its_episodes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down while half of the second step is played: those episodes are data."""
    service = Service()
    honest, count = Workbench.play, 0

    def flaky(self: Workbench, tasks: Any, **rest: Any) -> Any:
        nonlocal count
        count += 1
        if count != 2:
            return honest(self, tasks, **rest)
        first = honest(self, tasks[:2], **rest)
        service.kill()
        second = honest(self, tasks[2:], **rest)
        service.start()
        return first + second

    monkeypatch.setattr(Workbench, "play", flaky)
    try:
        run = train(tmp_path, "Served", 0, f"environment.options={{ url = '{service.url}' }}")
    finally:
        service.kill()
    assert_each_once(run)
    assert_failures_are_data(run, "Connection refused")
    assert [m["failed"] for m in steps_of(run)] == [0, 4, 0, 0, 0, 0]
    assert steps_of(run)[-1]["tasks_discarded"] == 1


# -- workers -------------------------------------------------------------------------------------------------


@both
def test_an_episode_that_cancels_itself_is_data(tmp_path: Path, staleness: int) -> None:
    """Its group must come: an asynchronous run would wait for it for ever."""
    run = train(tmp_path, "Leaving", staleness)
    assert_each_once(run)
    assert_failures_are_data(run, "cancelled from within")


@both
def test_a_job_that_somebody_cancels_ends_the_run_and_says_so(tmp_path: Path, staleness: int) -> None:
    with pytest.raises(RuntimeError, match=r"cancelled.*code that is not stepladder's|code .* cancelled"):
        train(tmp_path, "Stopping", staleness)


@both
def test_a_dead_compute_thread_ends_the_run_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    def die() -> None:
        raise MemoryError("no room for keys")

    with monkeypatch.context() as patch:
        at_call(patch, Scheduler, "step", 5, die, after=False)
        with (
            pytest.raises(InvariantError, match="compute thread failed with MemoryError: no room for keys"),
            within(60),
        ):
            train(tmp_path, "Uneven", staleness)
    assert_each_once(resume(tmp_path))


# -- the data ------------------------------------------------------------------------------------------------


@both
def test_a_task_that_cannot_be_read_is_named_and_a_resumed_run_goes_on(
    tmp_path: Path, staleness: int
) -> None:
    flag = tmp_path / "repaired"
    with (
        pytest.raises(DataError, match=r"task 3 of split 'train' cannot be read: .*OSError: bad sector"),
        within(60),
    ):
        train(tmp_path, "Unreadable", staleness, f"environment.options={{ train = 20, flag = '{flag}' }}")
    assert len(steps_of(tmp_path / "run")) < 6
    flag.touch()
    assert_each_once(resume(tmp_path))


@both
def test_the_end_of_the_data_in_the_middle_of_a_batch_ends_the_run_cleanly(
    tmp_path: Path, staleness: int
) -> None:
    """10 tasks, 3 a step: three steps and one of a single group; RL ends before its 6 steps."""
    run = train(tmp_path, "Uneven", staleness, "rl.tasks.epochs=1", "environment.options={ train = 10 }")
    assert_each_once(run, steps=4)
    assert [m["episodes"] for m in steps_of(run)] == [12, 12, 12, 4]
    end = {k: steps_of(run)[-1][f"tasks_{k}"] for k in ("drawn", "trained", "waiting")}
    assert end == {"drawn": 10, "trained": 10, "waiting": 0}
    played = {t["task"]["id"] for t in lines(run / "trajectories" / "rl.jsonl")}
    assert played == {f"train/{i}" for i in range(10)}
    assert (run / "final").is_dir()


@both
def test_data_that_end_with_a_batch_leave_no_empty_step(tmp_path: Path, staleness: int) -> None:
    run = train(tmp_path, "Uneven", staleness, "rl.tasks.epochs=2", "environment.options={ train = 6 }")
    assert_each_once(run, steps=4)


# -- what hangs ----------------------------------------------------------------------------------------------


@both
def test_a_call_that_hangs_is_data_after_its_deadline(tmp_path: Path, staleness: int) -> None:
    flag = f"environment.options={{ flag = '{tmp_path / 'hung'}' }}"
    with within(60):
        run = train(tmp_path, "Hanging", staleness, "rollout.deadline=0.3", flag)
    assert_each_once(run)
    assert_failures_are_data(run, "no result within 0.3 s")


@both
def test_ctrl_c_does_not_wait_for_what_hangs(tmp_path: Path, staleness: int) -> None:
    hung = tmp_path / "hung"
    with (
        _once(hung.exists, lambda: signal.raise_signal(signal.SIGINT)),
        within(45),
        pytest.raises(RunStopped, match=r"stopped by Ctrl-C.*stepladder resume"),
    ):
        train(tmp_path, "Hanging", staleness, f"environment.options={{ flag = '{hung}' }}")


@contextmanager
def _once(true: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do `act` as soon as `true`, from another thread."""
    given_up = threading.Event()

    def watch() -> None:
        while not given_up.wait(0.05):
            if true():
                act()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        given_up.set()
        thread.join()
