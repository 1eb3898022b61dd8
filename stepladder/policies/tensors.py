"""Tensors on disk: safetensors files, and a full disk told from other errors."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stepladder.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_FULL = (errno.ENOSPC, errno.EDQUOT)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, with dtypes and shapes kept; aliases are stored as separate copies."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage()
        shared = memory.data_ptr() in seen or memory.nbytes() != tensor.nbytes
        plain[name] = tensor.clone() if shared else tensor
        seen.add(memory.data_ptr())
    save_file(plain, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU. Raises CheckpointError when it is anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}.") from error


@contextmanager
def room_for(what: str, folder: Path) -> Iterator[None]:
    """A full disk inside the block becomes a CheckpointError that names `what`; other errors pass."""
    try:
        yield
    except Exception as error:
        if not disk_full(error):
            raise
        free = shutil.disk_usage(folder).free / 1e6
        raise CheckpointError(
            f"the disk is too full for {what}: {free:.1f} MB are free in {folder}; the checkpoints there are "
            "untouched. Make room and resume."
        ) from error


def disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk. Safetensors reports it as text only."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
