"""What an alarm is: a rule over the metrics of a run that remembers a little, and says why and what to do.

An alarm reads numbers by name, step after step, so it can be replayed on any `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

Metrics = Mapping[str, float]
Evidence = dict[str, float]


@dataclass(frozen=True, slots=True)
class Change:
    """One recipe key of [rl], dotted where it stands in a table of its own, and what to do with its value.

    >>> Change("learning_rate", "times", 0.5).applied(2e-5)
    1e-05
    """

    key: str
    how: Literal["times", "at_least", "at_most", "set"]
    value: float | str

    def applied(self, now: Any) -> Any:
        """The new value where `now` is the present one (None: the algorithm's own, or none)."""
        if self.how == "times":
            if now is None:
                raise ValueError(f"{self.key} has no value to scale by {self.value}")
            return now * self.value
        if now is None or self.how == "set":
            return self.value
        return max(now, self.value) if self.how == "at_least" else min(now, self.value)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A raised alarm: the numbers that raised it, one sentence of advice, and the advice as changes of keys.

    >>> alarm = Alarm("gradient_spike", 12, {"grad_norm": 40.0, "median": 2.0}, "a spike", "lower the rate")
    >>> print(alarm.sentence())
    gradient_spike at step 12: a spike (grad_norm 40, median 2). Advice: lower the rate
    """

    name: str
    step: int
    evidence: Evidence
    message: str
    advice: str
    remedy: tuple[Change, ...] = ()

    def sentence(self) -> str:
        """Name, evidence and advice as one line."""
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in self.evidence.items())
        return f"{self.name} at step {self.step}: {self.message} ({numbers}). Advice: {self.advice}"

    def plain(self) -> dict[str, Any]:
        """As JSON: a line of alarms.jsonl."""
        return asdict(self)


@dataclass(slots=True)
class Smoothed:
    """An exponential moving average with its peak and trough; the first `settle` values cannot be either."""

    weight: float = 0.4
    settle: int = 3
    value: float | None = None
    peak: float | None = None
    trough: float | None = None
    count: int = 0
    recent: list[float] = field(default_factory=list)  # the average at the last 10 observations

    def add(self, new: float | None) -> bool:
        """Take in one number; False, and nothing happens, where there is none."""
        if new is None or not math.isfinite(new):
            return False
        self.value = new if self.value is None else (1 - self.weight) * self.value + self.weight * new
        self.count += 1
        self.recent = [*self.recent[-9:], self.value]
        if self.count >= self.settle:
            self.peak = self.value if self.peak is None else max(self.peak, self.value)
            self.trough = self.value if self.trough is None else min(self.trough, self.value)
        return True

    @property
    def of_peak(self) -> float:
        """The average as a share of its peak; 1 where there is no peak above 0 yet."""
        if self.value is None or self.peak is None or self.peak <= 0:
            return 1.0
        return self.value / self.peak

    @property
    def rise(self) -> float:
        """How much it gained over the last 10 observations (fewer at the start)."""
        return self.recent[-1] - self.recent[0] if self.recent else 0.0

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `dataclasses.asdict` gave."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


class Detector:
    """Base of the alarms. A subclass gives `judge`; this counts how long its verdict holds.

    An alarm is raised once the verdict has held for `patience` observations in a row (or for what `waits`
    says), and again only after it was false for `patience`. Nothing is raised while smoothed success is
    `solved_at` or more, and steps in which no group is open (all are solved) are no observation: a converged
    run is no collapse.
    """

    name: ClassVar[str]
    patience: ClassVar[int] = 3
    solved_at: ClassVar[float] = 0.9
    averages: ClassVar[tuple[str, ...]] = ()
    """Metrics that are smoothed, by name."""
    message: ClassVar[str]
    advice: ClassVar[str]
    remedy: ClassVar[tuple[Change, ...]] = ()

    def __init__(self) -> None:
        self.smooth = {name: Smoothed() for name in ("success", "reward", *self.averages)}
        self.held = 0
        self.clear = 0
        self.raised = False

    def judge(self, metrics: Metrics) -> Evidence | None:
        """The numbers that speak for an alarm at this step; None where all is well."""
        raise NotImplementedError

    def see(self, step: int, metrics: Metrics) -> Alarm | None:
        """Take in one step; the alarm where it is raised now."""
        if metrics.get("open_groups", 1.0) <= 0.0:
            self.smooth["success"].add(metrics.get("success"))
            return None
        for name, smoothed in self.smooth.items():
            smoothed.add(metrics.get(name))
        evidence = self.judge(metrics)
        if (self.smooth["success"].value or 0.0) >= self.solved_at:
            evidence = None
        self.held = self.held + 1 if evidence else 0
        self.clear = 0 if evidence else self.clear + 1
        if self.clear >= self.patience:
            self.raised = False
        if evidence is None or self.raised or self.held < self.waits(evidence):
            return None
        self.raised = True
        return Alarm(self.name, step, evidence, self.message, self.advice, self.cure())

    def waits(self, evidence: Evidence) -> int:
        """For how many observations in a row there must be evidence; `patience` unless it says otherwise."""
        return self.patience

    def cure(self) -> tuple[Change, ...]:
        """The changes that the advice asks for; `remedy` where they do not depend on what was seen."""
        return self.remedy

    def improving(self) -> bool:
        """Has reward risen lately? Then what looks like a collapse is learning."""
        return self.smooth["reward"].rise > 0.02 * max(1e-9, abs(self.smooth["reward"].peak or 0.0))

    def state(self) -> dict[str, Any]:
        """All it remembers, as plain JSON."""
        out: dict[str, Any] = {name: asdict(s) for name, s in self.smooth.items()}
        return {"smooth": out, "held": self.held, "clear": self.clear, "raised": self.raised}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        for name, saved in state["smooth"].items():
            self.smooth[name].load(saved)
        self.held, self.clear, self.raised = state["held"], state["clear"], state["raised"]
