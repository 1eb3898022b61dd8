"""Checkpoints that survive a kill at any instant, a full disk and a damaged newest one.

    root/step-00000012/      renamed into place only when complete and on disk
        manifest.json        the step, and every file's size and CRC-32
        state.json           the run's state as JSON: counters, cursors, schedules
        ...                  whatever the caller wrote, tensors as safetensors

Nothing here unpickles: a checkpoint from anywhere can be opened without running its code.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepladder.atomic import atomic_directory, clean_leftovers, remove_tree
from stepladder.errors import CheckpointError, ConfigError
from stepladder.policies.tensors import disk_full

if TYPE_CHECKING:
    pass

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
_STEP = re.compile(r"^step-(\d{8,})$")


class CheckpointStore:
    """The checkpoints of one run, newest `keep` kept. One process writes; others may read.

    >>> store = CheckpointStore(Path("run/checkpoints"), keep=2)       # doctest: +SKIP
    >>> store.save(12, write_weights, {"tokens": 99})                  # doctest: +SKIP
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, the newest checkpoint; got {keep}. Try keep = 2.")
        self.root = Path(root)
        self.keep = keep
        self.root.mkdir(parents=True, exist_ok=True)
        clean_leftovers(self.root)

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        state: Mapping[str, Any],
        *,
        expected_bytes: int | None = None,
    ) -> Path:
        """Write a checkpoint aside, make it durable, rename it, and only then delete older ones.

        `write(folder)` puts the caller's files into an empty folder; `state` is stored as JSON. Space is
        checked first against `expected_bytes` (default: the size of the newest checkpoint).

        Raises CheckpointError when the disk is full (older checkpoints stay loadable, nothing half-written
        stays behind) or when `state` is not plain JSON.
        """
        encoded = _encode_state(state)
        self.root.mkdir(parents=True, exist_ok=True)  # someone may have made room by deleting all of it
        needed = expected_bytes if expected_bytes is not None else self._newest_size()
        self._check_space(step, needed + len(encoded))
        final = self.root / f"step-{step:08d}"
        try:
            with atomic_directory(final) as folder:
                write(folder)
                (folder / STATE).write_text(encoded, encoding="utf-8")
                _write_manifest(folder, step)
        except Exception as error:
            if disk_full(error):
                raise self._no_space(step, needed + len(encoded)) from error
            raise
        self._forget(step)
        return final

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; nothing is verified."""
        found = (_STEP.match(path.name) for path in self.root.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all there and unchanged; damaged ones are skipped, aloud."""
        for step in reversed(self.steps()):
            path = self.root / f"step-{step:08d}"
            damage = find_damage(path)
            if damage is None:
                return path
            warnings.warn(f"skipping checkpoint {path}: {damage}.", RuntimeWarning, stacklevel=2)
        return None

    def load_state(self, path: Path) -> dict[str, Any]:
        """The `state` given to `save`. Raises CheckpointError when it cannot be read."""
        return read_state(path)

    def _newest_size(self) -> int:
        steps = self.steps()
        return folder_size(self.root / f"step-{steps[-1]:08d}") if steps else 0

    def _check_space(self, step: int, needed: int) -> None:
        if shutil.disk_usage(self.root).free < needed:
            raise self._no_space(step, needed)

    def _no_space(self, step: int, needed: int) -> CheckpointError:
        free = shutil.disk_usage(self.root).free
        kept = self.steps()
        rest = f"the checkpoint of step {kept[-1]} is untouched" if kept else "there is no older one"
        size = f"about {needed / 1e6:.1f} MB are needed and " if needed > free else ""
        return CheckpointError(
            f"the disk is too full for the checkpoint of step {step}: {size}{free / 1e6:.1f} MB are free in "
            f"{self.root}; {rest}. Make room and resume, or set a lower `run.keep_checkpoints`."
        )

    def _forget(self, step: int) -> None:
        """Delete what is older than the newest `keep`, and what a resume from `step`'s past made obsolete."""
        for later in [other for other in self.steps() if other > step]:
            remove_tree(self.root / f"step-{later:08d}")
        for old in self.steps()[: -self.keep]:
            remove_tree(self.root / f"step-{old:08d}")


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint folder. Raises CheckpointError when it is missing or broken."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} has no readable {STATE}: {error}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} must hold a JSON object; got {type(state).__name__}.")
    return state


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None: every file is read once and compared."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, version = dict(manifest["files"]), manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if version != FORMAT:
        return f"its format is {version}, this version reads {FORMAT}"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if _crc32(file) != entry["crc32"]:
            return f"the content of {name} changed"
    return None


def folder_size(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _encode_state(state: Mapping[str, Any]) -> str:
    try:
        encoded = json.dumps(dict(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of a checkpoint must be plain JSON (no NaN, no tensors): {error}; "
            "tensors belong into save_tensors, a missing number is None."
        ) from error
    return encoded


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": _crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    content = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value
