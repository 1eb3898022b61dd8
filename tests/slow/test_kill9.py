"""Kill -9 at twenty random moments of a real run, resume each time: it ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import kill_at_random, play_quietly, where
from spine import assert_same, lines, outcome

KILLS = 20
# A reference, adaptive sampling, two updates a batch and evaluations: all that a checkpoint must remember.
SETTINGS = (
    "rl.kl.coefficient=0.01",
    "rl.tasks.sampling=adaptive",
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
    "rl.kl.target=0.5",
    "rl.kl.horizon=1000",
    "rl.kl.reference_every=7",
    "rl.entropy.target=1.0",
    "rl.tasks.dynamic_sampling=true",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [SETTINGS, WITH_CRITIC], ids=["grpo", "ppo"])
def test_twenty_kills_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    calm = play_quietly(tmp_path, settings)
    quiet = calm.folder

    def finished(run: Path) -> str:
        assert_same(run, quiet)
        return " and equal to the quiet one"

    killed, kills = kill_at_random(calm, settings, KILLS, share=1 / 5, left=where, finished=finished)
    report = [
        f"quiet run: {len(lines(quiet / 'metrics.jsonl'))} lines of metrics; {calm.starting:.0f} s until the "
        f"first line on the screen, {calm.work:.0f} s from there to the end",
        *kills,
    ]
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
