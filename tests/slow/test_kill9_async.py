"""Kill -9 at twenty random moments of a run that plays while it trains: each task is trained on once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from killing import kill_at_random, newest, play_quietly, where
from spine import lines

KILLS, TASKS, STALENESS = 20, 483, 2
# Episodes of uneven length, four updates a batch; one pass over the tasks, 6 a step: 80 steps and one of 3.
SETTINGS = (
    "run.exact=false",
    "run.checkpoint_every=3",
    f"rl.off_policy.max_staleness={STALENESS}",
    "rl.tasks.epochs=1",
    "rl.steps=1000",
    "rl.tasks_per_step=6",
    "rl.updates_per_batch=4",
    "environment.name=tests/helpers/fault_worlds.py:Uneven",
    f"environment.options={{ train = {TASKS} }}",
    "evaluation.raw=0",
)
EVERY = {f"train-{k}" for k in range(TASKS)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_lose_no_task_and_train_on_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    calm = play_quietly(tmp_path, SETTINGS)
    report = [
        f"quiet run: {account(calm.folder)}; {calm.starting:.0f} s until the first line on the screen, "
        f"{calm.work:.0f} s from there to the end"
    ]
    killed, kills = kill_at_random(
        calm, SETTINGS, KILLS, share=1 / 10, left=left, finished=lambda run: f": {account(run)}"
    )
    report += kills
    report.append(f"after {KILLS} kills: {account(killed)}")
    with capsys.disabled():
        print("\n" + "\n".join(report))


def account(run: Path) -> str:
    """A finished run: every task of the data once, with all its siblings, and the log says so."""
    counts = Counter(t["group_id"] for t in lines(run / "trajectories" / "rl.jsonl"))
    assert set(counts) == EVERY
    assert set(counts.values()) == {4}
    steps = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]
    assert [m["step"] for m in steps] == list(range(1, 82))
    assert [m["episodes"] for m in steps] == [24.0] * 80 + [12.0]
    for m in steps:
        assert m["tasks_drawn"] == m["tasks_trained"] + m["tasks_discarded"] + m["tasks_waiting"]
        assert m["version_lag_max"] <= STALENESS
    assert any(m["version_lag_max"] > 0 for m in steps)
    end = {name: steps[-1][f"tasks_{name}"] for name in ("drawn", "trained", "discarded", "waiting")}
    assert end == {"drawn": TASKS, "trained": TASKS, "discarded": 0, "waiting": 0}
    return (
        f"{len(steps)} steps, of {TASKS} tasks {end['drawn']:.0f} drawn, {end['trained']:.0f} trained on "
        f"(each once), {end['discarded']:.0f} discarded, {end['waiting']:.0f} waiting; oldest token "
        f"{max(m['version_lag_max'] for m in steps):.0f} updates"
    )


def left(run: Path) -> str:
    """What a kill left: in the newest checkpoint, the tasks drawn are those trained on and those waiting."""
    state = newest(run)
    if state is None or state["rung"] != "rl":
        return where(run)
    rl, size = state["state"], state["cursor"].get("trajectories/rl.jsonl", 0)
    log = (run / "trajectories" / "rl.jsonl").read_bytes()[:size] if size else b""
    trained = {json.loads(line)["group_id"] for line in log.splitlines()}
    waiting = [item["group_id"] for item in rl["waiting"]]
    drawn = rl["sampler"]["drawn"]
    assert len(trained) == rl["tasks_trained"]
    assert len(waiting) == len(set(waiting))
    assert trained.isdisjoint(waiting)
    assert trained | set(waiting) == {f"train-{k}" for k in range(drawn)}
    played = sum(item["trajectories"] is not None for item in rl["waiting"])
    return (
        f"rl step {rl['step']}: {drawn} tasks drawn, {len(trained)} trained on, {len(waiting)} waiting "
        f"({played} of them played)"
    )
