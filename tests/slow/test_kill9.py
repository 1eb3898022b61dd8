"""Kill -9 at twenty random moments of a real run, resume each time: it ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killing import recipe_file, start, where
from spine import assert_same, lines, outcome

KILLS = 20
# A reference, adaptive sampling, two updates a batch and evaluations: all that a checkpoint must remember.
SETTINGS = (
    "rl.kl_coefficient=0.01",
    "rl.sampling=adaptive",
    "rl.updates_per_batch=2",
    "rl.evaluate_every=40",
    "rl.steps=160",
    "rl.tasks_per_step=6",
    "sft.demonstrations=200",
    "run.checkpoint_every=3",
)
# What else a checkpoint must remember: a critic's weights and moments, coefficients that adapt, a reference
# that was refreshed, dry steps.
WITH_CRITIC = (
    *SETTINGS,
    "rl.algorithm=ppo",
    "rl.kl_target=0.5",
    "rl.kl_horizon=1000",
    "rl.reference_every=7",
    "rl.entropy_target=1.0",
    "rl.dynamic_sampling=true",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [SETTINGS, WITH_CRITIC], ids=["grpo", "ppo"])
def test_twenty_kills_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    began = time.monotonic()
    child = start("train", recipe_file(tmp_path, "quiet", settings))
    assert child.stdout is not None
    child.stdout.readline()
    first = time.monotonic()
    _, err = child.communicate(timeout=900)
    assert child.returncode == 0, err
    starting, work = first - began, time.monotonic() - first
    report = [
        f"quiet run: {len(lines(quiet / 'metrics.jsonl'))} lines of metrics; {starting:.0f} s until the "
        f"first line on the screen, {work:.0f} s from there to the end"
    ]

    rng = random.Random(0)
    file, done = recipe_file(tmp_path, "killed", settings), 0
    while done < KILLS:
        exists = (killed / "recipe.toml").is_file()
        child = start("resume", str(killed)) if exists else start("train", file)
        assert child.stdout is not None
        if done % 5 == 0:  # anywhere in its start
            delay, since = rng.uniform(0, starting), "the start of the process"
        else:  # anywhere in its work
            child.stdout.readline()
            delay, since = rng.uniform(0, work / 5), "its first line"
        try:
            child.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            done += 1
            child.communicate()
            report.append(f"kill {done:2}: {delay:4.1f} s after {since}; resumes from {where(killed)}")
        else:
            _, err = child.communicate()
            assert child.returncode == 0, err  # it got to its end: the kills that are left hit the next run
            assert_same(killed, quiet)
            report.append("the run was finished and equal to the quiet one; another one for the kills left")
            killed = tmp_path / f"killed-{done}"
            file = recipe_file(tmp_path, killed.name, settings)
    child = start("resume", str(killed)) if (killed / "recipe.toml").is_file() else start("train", file)
    _, err = child.communicate(timeout=900)
    assert child.returncode == 0, err
    assert_same(killed, quiet)
    end = outcome(killed)
    report.append(
        f"after {KILLS} kills: weights ({len(end['weights'])} tensors), {len(end['metrics'])} lines of "
        f"metrics, {len(end['evaluations'])} evaluations and {len(end['trajectories'])} trajectories equal "
        "those of the quiet run"
    )
    steps = [m["step"] for m in end["metrics"] if m["phase"] == "rl"]
    assert steps == list(range(1, 161))
    assert not [p for p in (killed / "checkpoints").iterdir() if p.name.startswith(".")]
    with capsys.disabled():
        print("\n" + "\n".join(report))
