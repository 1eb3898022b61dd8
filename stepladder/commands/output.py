"""Files that a command writes: tried before the work, and replaced in one step after it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from stepladder.atomic import write_file
from stepladder.errors import ConfigError
from stepladder.reports.run import RECIPE
from stepladder.run.files import is_written
from stepladder.run.records import encode_line, trajectory_to_dict
from stepladder.types import Trajectory


def require_writable(out: Path | None) -> None:
    """Raise ConfigError where the file `out` cannot be written: before the evaluation, not after it."""
    if out is None:
        return
    folder = out.resolve().parent
    if (folder / RECIPE).is_file() and is_written(out.name):
        raise ConfigError(f"--out {out} is a file of that run itself; try --out {out.parent / 'eval.jsonl'}")
    try:
        if out.exists():
            out.open("ab").close()
        if not _special(out):
            _try_folder(out.resolve().parent)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}; try --out eval.jsonl") from error


def require_folder(report: Path | None) -> None:
    """Raise ConfigError where files cannot be written into the folder `report`."""
    if report is None:
        return
    try:
        _try_folder(report)
    except OSError as error:
        raise ConfigError(f"--report {report} cannot be written: {error}; try --report eval") from error


def _try_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _special(out: Path) -> bool:
    """Return whether `out` is a pipe such as /dev/stdout, which is written as it is and never renamed."""
    return out.exists() and not out.is_file()


def write_trajectories(out: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write one line per trajectory. A file that is there is replaced in one step, at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (encode_line(trajectory_to_dict(trajectory)).decode("ascii") for trajectory in trajectories)
    if _special(out):
        with out.open("w", encoding="ascii") as file:
            file.writelines(lines)
    else:
        write_file(out.resolve(), lines)
