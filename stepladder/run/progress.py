"""What a person sees while a run works: one live line, or a line a step where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from stepladder.evaluation import Evaluation
from stepladder.types import Trajectory

_SHOWN = (  # metric, label, format
    ("reward", "reward", ".2f"),
    ("success", "success", ".0%"),
    ("tool_rate", "tools", ".0%"),
    ("validation_loss", "val loss", ".4f"),
    ("validation_accuracy", "val acc", ".0%"),
    ("loss", "loss", ".4f"),
    ("margin", "margin", ".3f"),
    ("drift_chosen", "drift", "+.2f"),
    ("drift_desirable", "drift", "+.2f"),
    ("accuracy", "acc", ".0%"),
    ("acceptance", "accepted", ".0%"),
    ("teacher_kl", "teacher KL", ".3f"),
    ("grad_norm", "grad", ".2f"),
    ("entropy", "entropy", ".2f"),
    ("log_ratio_abs", "mismatch", ".4f"),
    ("tokens_per_second", "tok/s", ".0f"),
)


class Display:
    """Live progress with reward, success, tool rate, tokens/s and time left."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console()
        self.quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._name, self._unit, self._total, self._began, self._first, self._last = "", "", 0, 0.0, 0, 0

    def start(self, name: str, total: int, done: int, *, unit: str = "steps") -> None:
        """A new phase of `total` units, `done` of them already behind us."""
        self.stop()
        self._name, self._unit, self._total = name, unit, total
        self._began, self._first, self._last = time.monotonic(), done, done
        self._show_bar()

    def _show_bar(self) -> None:
        if self.quiet or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(24),
            TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {self._unit}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._name, total=self._total, completed=self._last, note="")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, another phase may start and end; then this one goes on. Its time left knows no pause."""
        phase, paused = (self._name, self._unit, self._total, self._first, self._last), time.monotonic()
        began = self._began
        yield
        self.stop()
        self._name, self._unit, self._total, self._first, self._last = phase
        self._began = began + time.monotonic() - paused
        self._show_bar()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One unit of the phase is done."""
        self._last = step
        known = metrics.keys() - ({"loss"} if "reward" in metrics else set())  # RL's says nothing
        note = "  ".join(f"{label} {metrics[key]:{form}}" for key, label, form in _SHOWN if key in known)
        for key in ("failed", "unscored"):
            if metrics.get(key):
                note += f"  {key} {metrics[key]:.0f}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, note=note)
        elif not self.quiet:
            spent = time.monotonic() - self._began
            left = spent / max(step - self._first, 1) * max(self._total - step, 0)
            self.console.print(
                f"{self._name} {step}/{self._total}  {note}  left {left:.0f}s",
                highlight=False,
                soft_wrap=True,  # in a log a step is one line
            )

    def trajectory(self, trajectory: Trajectory) -> None:
        """An episode ended; an evaluation counts these."""
        if self._bar is not None and self._task is not None and self._name.startswith("evaluating"):
            self._bar.advance(self._task)

    def evaluation(self, rung: str, result: Evaluation) -> None:
        """A finished evaluation, as a line that stays."""
        self.stop()
        if self.quiet:
            return
        low, high = result.interval
        failed = f", {result.failed} failed" if result.failed else ""
        self.console.print(
            f"[bold]{rung}[/]: {result.success:.1%} solved "
            f"(95% {low:.1%} to {high:.1%}, n={result.n}{failed}), tools {result.tool_rate:.0%}, "
            f"{result.seconds:.0f}s",
            highlight=False,
        )

    def alarm(self, sentence: str, changed: Mapping[str, Sequence[object]]) -> None:
        """An alarm, as a line that stays, with the settings that its remedy changed."""
        if self.quiet:
            return
        done = "".join(f"\n  rl.{key}: {before} -> {after}" for key, (before, after) in changed.items())
        self.console.print(f"ALARM {sentence}{done}", style="yellow", markup=False, highlight=False)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False)

    def status(self, text: str) -> None:
        """A passing remark."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, note=text)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
