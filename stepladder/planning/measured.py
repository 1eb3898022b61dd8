"""What a run measured of its rungs, beside what was estimated: plan.json in the run folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """One rung: bytes at the peak up to and with `step`, and that step's seconds."""

    step: int
    peak_bytes: float
    seconds: float
    estimated_bytes: float
    estimated_seconds: float

    def sentence(self) -> str:
        """Both, for people."""
        return (
            f"Measured at step {self.step}: {self.peak_bytes / 1e9:.2f} GB at the peak (estimated at most "
            f"{self.estimated_bytes / 1e9:.2f}), {self.seconds:.1f} s a step (estimated at most "
            f"{self.estimated_seconds:.1f})."
        )


def read_measured(run: Path) -> dict[str, Measured]:
    """By rung; empty where nothing was measured yet."""
    path = run / FILE
    if not path.is_file():
        return {}
    return {name: Measured(**row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}


def measured_json(table: dict[str, Measured]) -> str:
    """What `read_measured` reads."""
    rows = {name: dataclasses.asdict(row) for name, row in table.items()}
    return json.dumps(rows, indent=2) + "\n"
