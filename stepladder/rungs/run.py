"""The run that a rung is part of, as the rung sees it; `ladder.Ladder` is it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stepladder.recipe.common import CommonRecipe
from stepladder.types import Trajectory
from stepladder.workbench.bench import Workbench


@runtime_checkable
class Folder(Protocol):
    """The run folder; a resumed run cuts back what was logged after its checkpoint."""

    @property
    def path(self) -> Path: ...

    def log_data(self, rung: str, facts: Mapping[str, Any]) -> None:
        """Note what a rung is trained on; `facts` hold a "text" and a "fingerprint"."""

    def log_trajectories(
        self, trajectories: Iterable[Trajectory], *, step: int, phase: str, samples: bool = False
    ) -> None:
        """Append to trajectories/PHASE.jsonl."""

    def log_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append to one of the files that the rung's section names as `rows`."""

    def log_alarm(self, record: Mapping[str, Any]) -> None:
        """Append to alarms.jsonl."""


@runtime_checkable
class Screen(Protocol):
    """What a person sees of the run while it goes on."""

    def start(self, name: str, total: int, done: int, *, unit: str = "steps") -> None: ...

    def note(self, text: str) -> None: ...

    def status(self, text: str) -> None: ...

    def trajectory(self, trajectory: Trajectory) -> None: ...

    def alarm(self, sentence: str, changed: Mapping[str, Sequence[object]]) -> None: ...

    def aside(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class Run(Protocol):
    """What a rung may use of the run."""

    @property
    def recipe(self) -> CommonRecipe: ...

    @property
    def bench(self) -> Workbench: ...

    @property
    def folder(self) -> Folder: ...

    @property
    def display(self) -> Screen: ...

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics to metrics.jsonl, the tracker and the display."""

    def evaluate(self, label: str, step: int, n: int | None = None, *, keep: int | None = None) -> None:
        """Evaluate on `n` held-out tasks (the recipe's number) once under `label`, if there is a world."""

    def save(self) -> None:
        """Take a checkpoint of the run, with this rung's state and tensors."""

    def save_if_due(self) -> None:
        """Take a checkpoint where the last one is older than about a minute."""
