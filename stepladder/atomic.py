"""Folders and files that are either whole or not there, whatever kills the process."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ASIDE = re.compile(r"^\.(?P<kind>tmp|old)-(?P<name>.+)-(?P<pid>\d+)-\d+$")
_counter = itertools.count()
_ours: set[Path] = set()  # folders this process is working in: a recycled process id must not save the dead


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """A folder to fill; it appears as `final`, complete and on disk, only when the block ends well.

    Inside the block the files go to a hidden sibling of `final`. At the end every file and folder is
    fsynced and the sibling renamed. If the block raises, the sibling is removed and `final` is as it was.
    An existing `final` is replaced: it is moved aside first and deleted last; a process killed between
    leaves it recoverable, and `clean_leftovers` puts it back.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = _sibling(final, "tmp")
    _ours.add(aside)
    try:
        aside.mkdir()
        yield aside
        fsync_tree(aside)
        _swap(aside, final)
    finally:
        remove_tree(aside)
        _ours.discard(aside)


def _sibling(final: Path, kind: str) -> Path:
    return final.parent / f".{kind}-{final.name}-{os.getpid()}-{next(_counter)}"


def _swap(aside: Path, final: Path) -> None:
    """Rename `aside` to `final`. POSIX cannot replace a filled folder in one step, hence the detour."""
    if not final.exists():
        os.rename(aside, final)
        fsync_directory(final.parent)
        return
    old = _sibling(final, "old")
    _ours.add(old)
    try:
        os.rename(final, old)
        os.rename(aside, final)
        fsync_directory(final.parent)
    finally:  # Ctrl-C may fall between the two renames
        if old.exists() and not final.exists():
            os.rename(old, final)
        remove_tree(old)
        _ours.discard(old)


def clean_leftovers(parent: Path) -> list[Path]:
    """Remove what killed processes left in `parent`; a folder that was being replaced is put back.

    Folders of processes that are alive are left alone. Returns the paths that were handled.
    """
    handled = []
    for path in sorted(parent.glob(".*")) if parent.is_dir() else []:
        found = _ASIDE.match(path.name)
        if not found or path in _ours or _alive(int(found["pid"])):
            continue
        final = parent / found["name"]
        if found["kind"] == "old" and not final.exists():
            os.rename(path, final)
        else:
            remove_tree(path)
        handled.append(path)
    return handled


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # not in `_ours`, so an earlier process had our number (common in containers)
    if os.name != "posix":
        return True  # on Windows `os.kill(pid, 0)` is not a question
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_tree(path: Path) -> None:
    """Delete a folder if it is there. A problem is a warning, never an error: a run must not end by it."""
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"could not delete {path}: {error}; delete it by hand.", RuntimeWarning, stacklevel=2)


def fsync_tree(root: Path) -> None:
    """Force every file and folder below `root`, itself included, to disk."""
    if os.name != "posix":
        return  # Windows flushes only handles opened for writing
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as stream:
                os.fsync(stream.fileno())
        fsync_directory(Path(folder))


def fsync_directory(folder: Path) -> None:
    """Force a folder's entries to disk (a rename is durable only then)."""
    if os.name != "posix":
        return  # Windows has no handle for this
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, text: str | Iterable[str]) -> None:
    """Replace a text file in one step; of a text in pieces there is only one in memory at a time."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)
