"""Known faults 111 (delete before save), 114's neighbours and 125 (loaders that run code)."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from stepladder.errors import CheckpointError, ConfigError
from stepladder.policies.checkpoint import CheckpointStore, find_damage, read_state
from stepladder.policies.tensors import load_tensors, save_tensors


def _write(value: float) -> Callable[[Path], None]:
    return lambda folder: save_tensors(folder / "w.safetensors", {"w": torch.full((4,), value)})


def _value(path: Path) -> float:
    return float(load_tensors(path / "w.safetensors")["w"][0])


def test_save_and_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(3, _write(3), {"tokens": 17, "rng": [1, 2], "best": 0.1})
    assert store.latest() == path
    assert store.load_state(path) == {"tokens": 17, "rng": [1, 2], "best": 0.1}
    assert _value(path) == 3


def test_a_folder_deleted_while_a_run_works_costs_the_old_checkpoints_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, _write(1), {})
    shutil.rmtree(store.root)
    assert _value(store.save(2, _write(2), {})) == 2
    assert store.steps() == [2]


def test_keeps_the_newest_two_also_after_a_restart(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        CheckpointStore(tmp_path, keep=2).save(step, _write(step), {})
    assert CheckpointStore(tmp_path).steps() == [2, 3]


def test_keep_1_never_leaves_none(tmp_path: Path) -> None:
    """Fault 111: with one kept, the old one must outlive a save that fails."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, _write(1), {})

    def fails(folder: Path) -> None:
        assert store.steps() == [1]
        raise RuntimeError("the optimiser broke")

    with pytest.raises(RuntimeError, match="the optimiser broke"):
        store.save(2, fails, {})
    path = store.latest()
    assert path is not None
    assert _value(path) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_fills_up_during_a_save(tmp_path: Path, error: Exception) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, _write(1), {})

    def full(folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        raise error

    with pytest.raises(CheckpointError, match=r"too full .* step 2.*MB are free.*step 1 is untouched"):
        store.save(2, full, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert store.latest() == tmp_path / "step-00000001"


def test_space_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    called = []
    with pytest.raises(CheckpointError, match=r"about 1000000000000\.0 MB are needed"):
        store.save(1, lambda folder: called.append(folder), {}, expected_bytes=10**18)
    assert called == []


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A 3 MB file system in a private mount namespace; skipped where the kernel does not allow one."""
    mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path}"
    wrap = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*wrap, mount], capture_output=True).returncode:
        pytest.skip("no private mounts here")
    code = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from stepladder.errors import CheckpointError\n"
        "from stepladder.policies.checkpoint import CheckpointStore\n"
        "from stepladder.policies.tensors import load_tensors, save_tensors\n"
        "store = CheckpointStore(Path(sys.argv[1]) / 'c', keep=1)\n"
        "w = lambda n: lambda f: save_tensors(f / 'w.safetensors', {'w': torch.ones(n)})\n"
        "store.save(1, w(250_000), {})\n"
        "try:\n    store.save(2, w(600_000), {}, expected_bytes=0)\n"
        "except CheckpointError as e:\n    print(e)\n"
        "print(sorted(p.name for p in store.root.iterdir()), store.latest().name)\n"
        "print(load_tensors(store.latest() / 'w.safetensors')['w'].sum().item())\n"
    )
    script = tmp_path.parent / "script.py"
    script.write_text(code)
    command = f"{mount} && {sys.executable} {script} {tmp_path}"
    done = subprocess.run([*wrap, command], capture_output=True, text=True)
    assert "too full for the checkpoint of step 2" in done.stdout, done.stderr
    assert "['step-00000001'] step-00000001" in done.stdout
    assert "250000.0" in done.stdout


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no manifest", "torn manifest"])
def test_a_damaged_newest_one_is_skipped_aloud(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, _write(1), {})
    newest = store.save(2, _write(2), {"a": 1})
    target = newest / "w.safetensors"
    if damage == "truncate":
        os.truncate(target, target.stat().st_size - 1)
    elif damage == "flip":
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    elif damage == "delete":
        target.unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        os.truncate(newest / "manifest.json", 20)
    with pytest.warns(RuntimeWarning, match="skipping checkpoint .*step-00000002"):
        assert store.latest() == tmp_path / "step-00000001"


def test_after_resuming_from_an_older_one_the_newer_lineage_is_gone(tmp_path: Path) -> None:
    """Step 4 is damaged, the run goes on from 2 and saves 3: 3 and 2 are kept, not 4 and 3."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4):
        store.save(step, _write(step), {})
    (tmp_path / "step-00000004" / "w.safetensors").unlink()
    store.save(3, _write(3), {})
    assert store.steps() == [2, 3]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, _write(1), {})
    path = store.save(1, _write(9), {})
    assert _value(path) == 9
    assert find_damage(path) is None


def test_a_failing_delete_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, _write(1), {})

    def stuck(path: Path) -> None:
        raise OSError("device busy")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    with pytest.warns(RuntimeWarning, match="could not delete .*device busy"):
        path = store.save(2, _write(2), {})
    assert store.latest() == path


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), torch.zeros(1), {1, 2}])
def test_state_must_be_json(tmp_path: Path, bad: object) -> None:
    with pytest.raises(CheckpointError, match="plain JSON"):
        CheckpointStore(tmp_path).save(1, _write(1), {"x": bad})
    assert list(tmp_path.iterdir()) == []


def test_keep_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "new").latest() is None


def test_tensors_come_back_exactly_also_views_and_aliases(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tensors = {
        "a": base,
        "alias": base,
        "view": base[3:5],
        "transposed": base.view(3, 4).T,
        "bf16": base.bfloat16(),
        "bytes": torch.get_rng_state(),
        "scalar": torch.tensor(1.5, requires_grad=True),
        "empty": torch.zeros(0, 3),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    back = load_tensors(tmp_path / "t.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.detach())


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_a_planted_pickle_is_not_run(tmp_path: Path) -> None:
    """Fault 125: every file of a checkpoint is replaced by a pickle that would run a command."""
    store = CheckpointStore(tmp_path / "store")
    good = store.save(1, _write(1), {})
    touched = tmp_path / "pwned"
    bomb = pickle.dumps(_Bomb(touched))
    pickle.loads(bomb)  # the bomb works ...
    assert touched.exists()
    touched.unlink()
    names = [
        "w.safetensors",
        "state.json",
        "manifest.json",
        "rng_state.pth",
        "optimizer.pt",
        "training_args.bin",
    ]
    for name in names:
        (good / name).write_bytes(bomb)
    with pytest.warns(RuntimeWarning, match="skipping"):
        assert store.latest() is None
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(good)
    for name in names:
        with pytest.raises(CheckpointError, match="not a readable safetensors file"):
            load_tensors(good / name)
    assert not touched.exists()  # ... and nothing here set it off


def test_a_state_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="must hold a JSON object; got list"):
        read_state(tmp_path)
