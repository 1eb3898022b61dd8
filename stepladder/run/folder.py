"""The folder that a run fills, and that a killed run is continued from.

    recipe.toml          the recipe with every default written out
    environment.json     versions, machine, git commit
    data.json            what each rung was trained on: a line for people, and a fingerprint
    plan.json            memory and seconds of each rung, measured and estimated
    metrics.jsonl        one line per step
    evaluations.jsonl    one line per evaluation
    alarms.jsonl         one line per alarm, where there was one
    trajectories/        one line per trajectory
    accepted.jsonl       conversations that rejection sampling kept, pairs.jsonl: better and worse ones
    checkpoints/         see policies/checkpoint.py
    final/               the trained model, a Hugging Face folder
    report.html, summary.txt

A line is in the file when `log` returns. Each checkpoint stores `cursor()`; on resume `cut_back` removes
what was logged after it, so a resumed run's logs have every step once. Only files that the run itself writes
are touched (see run/files.py): an evaluation that someone put beside them stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from stepladder.atomic import write_file
from stepladder.errors import CheckpointError, ConfigError, InvariantError
from stepladder.recipe.config import bundled_recipes, rung_sections
from stepladder.reports.run import ALARMS, DATA, EVALUATIONS, METRICS, RECIPE, read_jsonl
from stepladder.run.files import ENVIRONMENT, LOCK, log_names, strange_names
from stepladder.run.provenance import describe_environment
from stepladder.run.records import encode_line, to_json, trajectory_to_dict
from stepladder.run.toml import to_toml
from stepladder.types import Trajectory


class RunFolder:
    """A run folder opened for writing; one process at a time. Use as a context manager, or `close()` it."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        """Use `RunFolder.create` or `RunFolder.open`."""
        self.path = path
        self._lock = lock
        self._streams: dict[str, BinaryIO] = {}
        self._names = log_names(self.recipe())
        for name in self._logs():
            _drop_torn_line(path / name)

    @classmethod
    def create(
        cls,
        path: Path,
        resolved_recipe: Mapping[str, Any],
        *,
        overwrite: bool = False,
        device: str | None = None,
    ) -> RunFolder:
        """Make a new run folder with its recipe and environment.

        Raises ConfigError when the folder is there and not empty (unless `overwrite`, which deletes an
        earlier run and refuses to delete anything else), or is in use by another process.
        """
        path = Path(path)
        recipe = to_toml(resolved_recipe)  # fails before anything is touched
        inside = cls.check_new(path, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _acquire(path)
        except OSError as error:  # no permission, a read-only disk, a file in the way
            raise ConfigError(
                f"the run folder {path} cannot be made: {error}; choose another place, for example "
                "run.out = 'runs'"
            ) from error
        try:
            for child in (child for child in inside if child.name not in (RECIPE, ENVIRONMENT)):
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
            environment = to_json(describe_environment(device))
            write_file(path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
            for name in ("trajectories", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
            write_file(path / RECIPE, recipe)  # last: its presence means that the folder is a run
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

    @staticmethod
    def check_new(path: Path, *, overwrite: bool) -> list[Path]:
        """What `create` would delete in `path`. Raises ConfigError like `create`, and touches nothing."""
        if path.exists() and not path.is_dir():
            raise ConfigError(f"the run folder {path} is a file; choose another name.")
        inside = [child for child in path.iterdir() if child.name != LOCK] if path.is_dir() else []
        whole = (path / RECIPE).is_file()
        # Without a recipe: all that `create` had made when it was killed.
        if not inside or (not whole and all(_begun(child) for child in inside)):
            return inside
        if not overwrite:
            raise ConfigError(
                f"the run folder {path} exists; continue it with `stepladder resume {path}`, choose another "
                "name, or delete it with --overwrite (from Python: overwrite=True)."
            )
        for name in (RECIPE, ENVIRONMENT):  # both stand there at any moment of a run, also of this deletion
            if not (path / name).is_file():
                raise ConfigError(
                    f"{path} is no run folder (no {name}), so overwrite will not delete it; choose another "
                    "name, for example run.name = 'again'"
                )
        strange = strange_names(path)
        if strange:
            raise ConfigError(
                f"the run folder {path} holds what no run writes: {_few(strange)}; overwrite would delete "
                "it. Move it elsewhere, or choose another name, for example run.name = 'again'"
            )
        return inside

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run to continue it. Raises ConfigError when it is no run, or is in use."""
        path = Path(path)
        if not (path / RECIPE).is_file():
            raise ConfigError(
                f"{path} is no run folder: it holds no {RECIPE}; name the folder a run printed."
            )
        lock = _acquire(path)
        try:
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe this run was started with."""
        return read_recipe(self.path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; `step` and `phase` say what it is about. NaN becomes null."""
        self._append(METRICS, [record])

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Append one line to evaluations.jsonl."""
        self._append(EVALUATIONS, [record])

    def log_alarm(self, record: Mapping[str, Any]) -> None:
        """Append one line to alarms.jsonl."""
        self._append(ALARMS, [record])

    def log_data(self, rung: str, facts: Mapping[str, Any]) -> None:
        """Note in data.json what a rung is trained on; `facts` hold a "text" and a "fingerprint".

        Raises CheckpointError when the run was begun on other data.
        """
        path = self.path / DATA
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if known.get(rung, facts)["fingerprint"] != facts["fingerprint"]:
            raise CheckpointError(
                f"the data of the rung {rung!r} changed since {self.path} was begun: it was "
                f"{known[rung]['text']!r} and is {facts['text']!r}; put the old data back, or start a new run"
            )
        write_file(path, json.dumps(to_json(known | {rung: dict(facts)}), indent=2) + "\n")

    def log_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        step: int,
        phase: str,
        decode: Callable[[Sequence[int]], str] | None = None,
        samples: bool = False,
    ) -> None:
        """Append trajectories to trajectories/PHASE.jsonl, each with its step; see `trajectory_to_dict`."""
        lines = [
            {"step": step, **trajectory_to_dict(item, decode=decode, samples=samples)}
            for item in trajectories
        ]
        self._append(f"trajectories/{phase}.jsonl", lines)

    def log_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a data file of the run, such as accepted.jsonl; `cut_back` knows it as well."""
        self._append(name, rows)

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics logged so far."""
        return read_jsonl(self.path / METRICS)

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations logged so far."""
        return read_jsonl(self.path / EVALUATIONS)

    def write_text(self, name: str, text: str) -> Path:
        """Write a file such as summary.txt in one step."""
        write_file(self.path / name, text)
        return self.path / name

    def cursor(self) -> dict[str, int]:
        """The length of every log in bytes, made durable first: store it in the checkpoint's state."""
        for stream in self._streams.values():
            os.fsync(stream.fileno())
        return {name: (self.path / name).stat().st_size for name in self._logs()}

    def cut_back(self, cursor: Mapping[str, int]) -> None:
        """Remove everything logged after `cursor()` was taken; `{}` goes back to the start of the run."""
        self._close_streams()
        for name in self._logs():
            path = self.path / name
            if name not in cursor:
                path.unlink()
            elif path.stat().st_size > cursor[name]:
                os.truncate(path, cursor[name])
        for name in set(self._names).intersection(cursor):
            path, size = self.path / name, cursor[name]
            found = path.stat().st_size if path.is_file() else 0
            if found < size:
                warnings.warn(
                    f"{path} has {found} bytes and had {size} at the checkpoint: lines of it were lost.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Close the files and let other processes write. Safe to call twice."""
        self._close_streams()
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _logs(self) -> list[str]:
        return [name for name in self._names if (self.path / name).is_file()]

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._names:
            raise InvariantError(
                f"{name!r} is no log of this run ({', '.join(self._names)}), so a resumed run would not cut "
                "it back; name it in run/files.py"
            )
        data = b"".join(encode_line(record) for record in records)
        if name not in self._streams:
            (self.path / name).parent.mkdir(exist_ok=True)
            # Unbuffered: what `write` accepted survives a kill of this process.
            self._streams[name] = open(self.path / name, "ab", buffering=0)  # noqa: SIM115
        try:
            _write_all(self._streams[name], data)
        except OSError as error:
            free = shutil.disk_usage(self.path).free / 1e6
            raise CheckpointError(
                f"cannot write to {self.path / name}: {error} ({free:.1f} MB free); make room, then "
                f"`stepladder resume {self.path}` continues from the last checkpoint."
            ) from error

    def _close_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def read_recipe(folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run. Raises ConfigError where something else has been written over it."""
    try:
        return tomllib.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{folder / RECIPE} is no TOML: {error}; put back the recipe that the run began with"
        ) from error


def model_folder(name: str) -> str | Path:
    """The trained model inside a run folder; anything else stays what it is.

    Raises ConfigError for a run that has not finished, and for one under runs/ that is not there, which would
    be taken for a hub id.
    """
    path = Path(name)
    if path.parts[:1] == ("runs",) and not path.exists():
        made = path.name if path.name in bundled_recipes() else "RECIPE"
        raise ConfigError(
            f"there is no run {name} in {Path.cwd()}; make it with `stepladder train {made}`, or name the "
            "folder of another run"
        )
    if (path / RECIPE).is_file():
        if not (path / "final").is_dir():
            rungs, asked = rung_sections().items(), read_recipe(path)
            scores = [name for name, kind in rungs if not kind.trains_policy and (path / name).is_dir()]
            if scores and not any(kind.trains_policy for name, kind in rungs if name in asked):
                raise ConfigError(
                    f"the run {path} trained scores and no policy; use it in a recipe, as "
                    f'environment.rewards = ["{scores[0]}:{path / scores[0]}"], or name another run'
                )
            raise ConfigError(
                f"the run {path} has not finished: it holds no final/ model. Continue it with "
                f"`stepladder resume {path}`"
            )
        return path / "final"
    return name


def _begun(path: Path) -> bool:
    """Is this one of the things that `create` makes before the recipe, with nothing of the user's in it?"""
    if path.name in ("trajectories", "checkpoints"):
        return path.is_dir() and not any(path.iterdir())
    return path.name == ENVIRONMENT or re.fullmatch(r"\..+\.\d+\.new", path.name) is not None


def _few(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _write_all(stream: BinaryIO, data: bytes) -> None:
    """A raw write may take only a part (a disk that fills up); go on until all is in or it raises."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _acquire(path: Path) -> FileLock:
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"the run folder {path} is in use by another process; wait for it, or choose another name."
        ) from error
    except OSError as error:  # no permission, a read-only disk
        raise ConfigError(
            f"the run folder {path} cannot be written: {error}; copy it to a place of "
            "your own and resume there"
        ) from error
    return lock


def _drop_torn_line(path: Path) -> None:
    """Cut what follows the last newline: its writer was killed within a line."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
