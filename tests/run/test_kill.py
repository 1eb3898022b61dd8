"""Kill -9 at twenty random moments, resume each time: logs and state equal those of a quiet run."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from stepladder.policies.checkpoint import CheckpointStore
from stepladder.run.folder import RunFolder

# A training loop in small: the "weights" are a chain of hashes, so one step lost or done twice shows.
LOOP = """
import hashlib, sys, time
from pathlib import Path
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.run.folder import RunFolder

path, last = Path(sys.argv[1]), int(sys.argv[2])
with RunFolder.open(path) as run:
    store = CheckpointStore(run.checkpoints, keep=2)
    found = store.latest()
    state = store.load_state(found) if found else {"step": 0, "cursor": {}}
    weights = (found / "weights").read_bytes() if found else b"start"
    run.cut_back(state["cursor"])
    print("ready", flush=True)
    for step in range(state["step"], last):
        weights = hashlib.sha256(weights + bytes([step % 256])).digest()
        time.sleep(0.002)  # on a fast disk too, twenty kills fall before the end
        run.log({"step": step, "weights": weights.hex()})
        run.log_evaluation({"step": step})
        if step % 3 == 2 or step == last - 1:
            data = weights
            store.save(step + 1, lambda folder: (folder / "weights").write_bytes(data),
                       {"step": step + 1, "cursor": run.cursor()})
print("done", flush=True)
"""


def _start(path: Path, last: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", LOOP, str(path), str(last)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def _finish(child: subprocess.Popen[str]) -> str:
    out, _ = child.communicate(timeout=120)
    return out


def test_nothing_is_lost_or_done_twice(tmp_path: Path) -> None:
    last = 240
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for path in (quiet, killed):
        RunFolder.create(path, {"seed": 0}).close()
    assert _finish(_start(quiet, last)) == "done\n"

    rng = random.Random(0)
    kills = 0
    for _ in range(20):
        child = _start(killed, last)
        time.sleep(rng.uniform(0, 0.04))
        child.send_signal(signal.SIGKILL)
        kills += _finish(child) == ""
    assert _finish(_start(killed, last)) == "done\n"
    assert kills >= 10  # most of them really fell into the work

    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert (killed / name).read_bytes() == (quiet / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(last))
    ends = [CheckpointStore(path / "checkpoints").latest() for path in (quiet, killed)]
    assert [end.name for end in ends if end] == [f"step-{last:08d}"] * 2
    assert (ends[0] / "weights").read_bytes() == (ends[1] / "weights").read_bytes()
    assert len(list((killed / "checkpoints").iterdir())) == 2  # no leftovers of the dead
