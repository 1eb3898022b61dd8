"""Fits whose training was all for nothing: no epoch beat the weights that they began with."""

from __future__ import annotations

from stepladder.reports.run import RunData
from stepladder.reports.wording import NONE_BETTER


def fit_texts(run: RunData) -> list[str]:
    """A line for each fit whose last validation says so; a fit that goes on may still find a better epoch."""
    last: dict[tuple[str, int], tuple[float, float]] = {}  # (phase, fit) -> (epoch, the best one)
    count: dict[str, int] = {}
    for record in run.metrics:
        if "best_epoch" not in record:
            continue
        phase, epoch = str(record.get("phase")), record["epoch"]
        fit = count.setdefault(phase, 1)
        if epoch <= last.get((phase, fit), (0.0, 0.0))[0]:  # epochs are counted anew: the next round
            fit = count[phase] = fit + 1
        last[phase, fit] = (epoch, record["best_epoch"])
    in_rounds = {str(record.get("phase")) for record in run.metrics if "round" in record}
    return [
        _sentence(phase, fit, phase in in_rounds) for (phase, fit), (_, best) in last.items() if best == 0
    ]


def _sentence(phase: str, fit: int, in_rounds: bool) -> str:
    if in_rounds:
        return f"{phase}, round {fit}: {NONE_BETTER.format('round')}"
    return f"{phase}: {NONE_BETTER.format('rung')}"
