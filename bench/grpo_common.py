"""What both workers of grpo.py share; it imports neither library."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resident import peak

RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Step:
    """`texts`: the step's prompts, each answered `group` times; `completions` are given where both sides must
    train on the same tokens."""

    kind: str
    texts: tuple[str, ...]
    completions: tuple[tuple[int, ...], ...] = ()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "mode"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("group", "new", "micro", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def read(path: Path) -> list[Step]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Step(r["kind"], tuple(r["texts"]), tuple(map(tuple, r["completions"]))) for r in rows]


def reward(ids: Sequence[int]) -> float:
    """Trivial, and different for nearly every completion, so that every group has a signal."""
    return float(sum(ids) % 97)


@dataclass
class Meter:
    """Seconds and peak memory of each step."""

    began: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def begin(self) -> None:
        with contextlib.suppress(OSError):  # no Linux: the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.began = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.peaks.append(peak())


def report(args: argparse.Namespace, meter: Meter, imports: float, state: float, **more: Any) -> None:
    """`imports`: bytes before the model was loaded; `state`: weights (all copies), gradients and moments."""
    found = {
        "seconds": meter.seconds,
        "peak_mb": [(p - imports) / 1e6 for p in meter.peaks],
        "activation_mb": [(p - imports - state) / 1e6 for p in meter.peaks],
        "state_mb": state / 1e6,
        **more,
    }
    args.out.write_text(json.dumps(found), encoding="utf-8")
