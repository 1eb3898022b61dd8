"""Metrics to TensorBoard, Weights & Biases or trackio besides metrics.jsonl; imported only if asked."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from stepladder.errors import ConfigError

Kind = Literal["none", "tensorboard", "wandb", "trackio"]


class Tracker(Protocol):
    """Where numbers go, step by step."""

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_tracker(kind: Kind, *, project: str, name: str, folder: Path, recipe: dict[str, Any]) -> Tracker:
    """The tracker of the recipe's `run.track`. Raises ConfigError when its package is missing."""
    if kind == "none":
        return _Nowhere()
    require_tracker(kind)
    if kind == "tensorboard":
        return _TensorBoard(folder / "tensorboard")
    own = {"dir": str(folder)} if kind == "wandb" else {}  # its files belong to the run, not to the cwd
    return _Hosted(importlib.import_module(kind), project=project, name=name, config=recipe, **own)


def require_tracker(kind: Kind) -> None:
    """Fail before a model is loaded, not at the first step."""
    if kind == "none":
        return
    try:
        importlib.import_module("torch.utils.tensorboard" if kind == "tensorboard" else kind)
    except ImportError as error:
        raise ConfigError(
            f"run.track = {kind!r} needs the package {kind}: pip install {kind}, or set run.track = 'none'"
        ) from error


class _Nowhere:
    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """metrics.jsonl has the numbers already."""

    def close(self) -> None:
        """Nothing is open."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder))

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(f"{phase}/{key}", value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Hosted:
    """wandb and trackio share one interface: init, log, finish."""

    def __init__(self, module: Any, **init: Any) -> None:
        self.module = module
        module.init(**init)

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        # Rungs count their steps apart; the phase's own step is a column, the clock of the run is theirs.
        self.module.log({f"{phase}/step": step, **{f"{phase}/{k}": v for k, v in metrics.items()}})

    def close(self) -> None:
        self.module.finish()
