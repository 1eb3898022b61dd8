"""The names that a run writes into its folder. Whatever else lies there is the user's, and stays."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from stepladder.reports.run import ALARMS, EVALUATIONS, METRICS
from stepladder.training.rows import ACCEPTED, PAIRS

LOCK = ".lock"
SAMPLING = "rejection_sampling"  # the only rung that writes rows of data


def log_names(sections: Collection[str]) -> tuple[str, ...]:
    """The logs of a run whose recipe has these sections, each with its path in the folder.

    >>> log_names(["model", "rl"])[-1]
    'trajectories/rl.jsonl'
    """
    phases = sorted(sections)
    top = [METRICS, EVALUATIONS, ALARMS]
    if SAMPLING in sections:
        top += [ACCEPTED, PAIRS]
        phases += [Path(ACCEPTED).stem, Path(PAIRS).stem]
    return (*top, *(f"trajectories/{phase}.jsonl" for phase in phases))
