"""A folder is whole or not there, whatever ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepladder import atomic


def _dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_appears_complete_and_leaves_nothing_else(tmp_path: Path) -> None:
    with atomic.atomic_directory(tmp_path / "a") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "sub" / "x").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_keeps_the_previous_one(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "a"
    with atomic.atomic_directory(final) as folder:
        (folder / "x").write_text("old")

    def fails() -> None:
        with atomic.atomic_directory(final) as folder:
            (folder / "x").write_text("new")
            raise error

    with pytest.raises(error):
        fails()
    assert (final / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_replaces_an_existing_folder_whole(tmp_path: Path) -> None:
    final = tmp_path / "a"
    final.mkdir()
    (final / "stale").write_text("old")
    with atomic.atomic_directory(final) as folder:
        (folder / "x").write_text("new")
    assert [p.name for p in final.iterdir()] == ["x"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_interrupted_between_the_two_renames_restores_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "a"
    final.mkdir()
    (final / "x").write_text("old")
    rename, calls = os.rename, []

    def second_rename_interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_rename_interrupted)
    with pytest.raises(KeyboardInterrupt), atomic.atomic_directory(final) as folder:
        (folder / "x").write_text("new")
    assert (final / "x").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_the_dead_are_cleaned_and_of_the_living_are_not(tmp_path: Path) -> None:
    dead, alive = _dead_pid(), os.getppid()
    (tmp_path / f".tmp-a-{dead}-0").mkdir()
    (tmp_path / f".tmp-a-{alive}-0").mkdir()
    (tmp_path / f".tmp-a-{os.getpid()}-987654").mkdir()  # an earlier process that had our number
    (tmp_path / ".config").mkdir()  # not ours at all
    with atomic.atomic_directory(tmp_path / "b") as folder:  # in use by this very process
        (folder / "x").write_text("1")
        atomic.clean_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".config", f".tmp-a-{alive}-0", "b"]


def test_a_folder_lost_between_two_renames_of_a_killed_process_is_put_back(tmp_path: Path) -> None:
    dead = _dead_pid()
    old = tmp_path / f".old-my-run-{dead}-3"
    old.mkdir()
    (old / "x").write_text("old")
    atomic.clean_leftovers(tmp_path)
    assert (tmp_path / "my-run" / "x").read_text() == "old"


def test_kill_9_while_writing_leaves_the_old_one(tmp_path: Path) -> None:
    """The child is killed inside the block; the parent then finds the old folder and cleans the new one."""
    code = (
        "import sys, os, signal, pathlib\n"
        "from stepladder.atomic import atomic_directory\n"
        "with atomic_directory(pathlib.Path(sys.argv[1])) as f:\n"
        "    (f / 'x').write_text('new')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    final = tmp_path / "a"
    final.mkdir()
    (final / "x").write_text("old")
    subprocess.run([sys.executable, "-c", code, str(final)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    atomic.clean_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (final / "x").read_text() == "old"


def test_write_file_replaces_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.txt"
    atomic.write_file(path, "one")

    def broken(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no"):
        atomic.write_file(path, "two")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.txt"]
