"""run.track with the real packages: what metrics.jsonl holds has arrived, read back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepladder.errors import ConfigError
from stepladder.run.tracking import require_tracker

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
READER = Path(__file__).with_name("read_tracker.py")
MAIN = "from stepladder.cli import main; main()"
SHORT = ("rl.steps=3", "sft.epochs=1", "evaluation.tasks=10", "evaluation.raw=0", "run.threads=1")


def needed(kind: str) -> None:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed: pip install 'stepladder[tracking]'")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_the_metrics_of_a_run_arrive(kind: str, tmp_path: Path) -> None:
    needed(kind)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    train = [sys.executable, "-c", MAIN, "train", "hidden_digit", f"run.out={tmp_path}", "run.name=tracked"]
    train += [f"run.track={kind}", *SHORT]
    subprocess.run(train, env=environment, cwd=tmp_path, check=True, timeout=600, capture_output=True)
    run = tmp_path / "tracked"
    read = [sys.executable, str(READER), kind, str(run), "tracked"]
    done = subprocess.run(read, env=environment, check=True, timeout=120, capture_output=True, text=True)
    arrived = json.loads(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"sft", "rl"}
    for phase in ("sft", "rl"):
        names = {k for line in lines if line["phase"] == phase for k in line} - {"phase", "step"}
        assert len(names) > 3
        for name in names:
            wrote = [line[name] for line in lines if line["phase"] == phase and name in line]
            assert arrived[f"{phase}/{name}"] == pytest.approx(wrote, rel=1e-6), name
    assert not (tmp_path / "wandb").exists()  # its files lie in the run folder


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named_before_anything_runs(kind: str) -> None:
    if importlib.util.find_spec(kind) is not None:
        pytest.skip(f"{kind} is installed here")
    with pytest.raises(ConfigError, match=f"needs the package {kind}: pip install {kind}"):
        require_tracker(kind)  # type: ignore[arg-type]
