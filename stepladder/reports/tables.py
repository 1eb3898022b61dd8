"""What the reports say about the rungs, as numbers and short texts; the summary and the page share it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepladder.recipe.config import rung_sections
from stepladder.reports.run import Record, RunData

LABELS = {
    "raw": "raw model",
    "few-shot": "raw model, shown worked examples",
    **{name: section.label for name, section in rung_sections().items()},
    "more-sft": "control: more SFT instead of RL",
}
NONE = "-"


@dataclass(frozen=True, slots=True)
class RungRow:
    """One rung of the ladder: its last evaluation."""

    rung: str
    label: str
    success: float | None
    interval: tuple[float, float] | None
    n: int
    tool_rate: float | None
    seconds: float | None
    temperature: float | None
    by_domain: Mapping[str, tuple[float | None, int]]
    examples: tuple[Record, ...]
    outcomes: str = ""  # "1" or "0" a task, in order


@dataclass(frozen=True, slots=True)
class StepUp:
    """A rung against the one before, on the same tasks: solved only after it, solved only before it."""

    rung: str
    before: str
    n: int
    better: int
    worse: int
    p: float


def steps_up(rows: Sequence[RungRow]) -> list[StepUp]:
    """Each rung against the last one before it that played the same number of tasks (the first of the split).

    Examples in the prompt and evaluations in the middle of a rung are no rungs.
    """
    whole = [row for row in rows if row.outcomes and row.rung in LABELS and row.rung != "few-shot"]
    out = []
    for i, row in enumerate(whole):
        earlier = [r for r in whole[:i] if len(r.outcomes) == len(row.outcomes)]
        if earlier:
            pairs = list(zip(earlier[-1].outcomes, row.outcomes, strict=True))
            better, worse = pairs.count(("0", "1")), pairs.count(("1", "0"))
            found = sign_test(better, worse)
            out.append(StepUp(row.rung, earlier[-1].rung, len(pairs), better, worse, found))
    return out


def rung_rows(run: RunData) -> list[RungRow]:
    """The last evaluation of each rung, in the order in which the rungs were first climbed."""
    last: dict[str, Record] = {}
    for record in run.evaluations:
        last[str(record.get("rung", "?"))] = record
    return [_row(rung, record) for rung, record in last.items()]


def _row(rung: str, record: Record) -> RungRow:
    n = int(record.get("n") or 0)
    success = record.get("success")
    interval = record.get("interval")
    if interval is None and success is not None and n > 0:
        interval = wilson_interval(round(success * n), n)
    domains = record.get("by_domain") or {}
    return RungRow(
        rung=rung,
        label=LABELS.get(rung, rung),
        success=success,
        interval=(interval[0], interval[1]) if interval else None,
        n=n,
        tool_rate=record.get("tool_rate"),
        seconds=record.get("seconds"),
        temperature=record.get("temperature"),
        by_domain={str(name): (d.get("success"), int(d.get("n") or 0)) for name, d in domains.items()},
        examples=tuple(record.get("examples") or ()),
        outcomes=str(record.get("outcomes") or ""),
    )


def wilson_interval(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson, 1927); unlike ±2 standard errors right near 0 and 1.

    Centre (p + z²/2n) / (1 + z²/n), half width z·sqrt(p(1−p)/n + z²/4n²) / (1 + z²/n).

    >>> [round(x, 3) for x in wilson_interval(0, 10)]
    [0.0, 0.278]
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"need 0 <= successes <= n and n > 0; got {successes} of {n}")
    p, scale = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, (1.0 if successes == n else min(1.0, centre + half))


def sign_test(better: int, worse: int) -> float:
    """The exact two-sided p of `better` against `worse` under even odds; ties say nothing.

    p = min(1, 2·Σ_{i ≤ min} C(n, i)/2^n), n = better + worse. On solved-or-not it is McNemar's exact test.

    >>> sign_test(5, 0), sign_test(0, 0)
    (0.0625, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**n))


def families(rows: Sequence[RungRow]) -> list[str]:
    """All problem families of the evaluations, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.by_domain))


def example_pair(rows: Sequence[RungRow]) -> tuple[tuple[RungRow, Record], tuple[RungRow, Record]] | None:
    """One trajectory before and one after training, of the same task where both rungs have one.

    Before is the first rung, after is the last that was climbed. The first task in common is taken: it is not
    chosen by how well it went.
    """
    with_examples = [row for row in rows if row.examples]
    if len(with_examples) < 2:
        return None
    before = with_examples[0]
    climbed = [row for row in with_examples[1:] if row.rung in rung_sections()]
    after = climbed[-1] if climbed else with_examples[-1]
    later = {task_id(example): example for example in reversed(after.examples)}
    for example in before.examples:
        if task_id(example) in later:
            return (before, example), (after, later[task_id(example)])
    return (before, before.examples[0]), (after, after.examples[0])


def task_id(trajectory: Mapping[str, Any]) -> str:
    """The id of a trajectory's task."""
    return str((trajectory.get("task") or {}).get("id", NONE))


def content_text(content: Any) -> str:
    """The text of a message's content; an image is named, not shown."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part["text"]) if "text" in part else "[image]" for part in parts)


def percent(value: float | None) -> str:
    """A share as text, one decimal: with 200 tasks one task is half a point."""
    return NONE if value is None else f"{100 * value:.1f} %"


def interval_text(interval: tuple[float, float] | None) -> str:
    return NONE if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them.

    >>> duration(8.25), duration(75.2), duration(7384)
    ('8.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None) -> str:
    """A measured number in at most six characters or so.

    >>> number(0.0312), number(1234.5), number(12.34), number(3e-7), number(4.0)
    ('0.0312', '1234', '12.3', '3e-07', '4')
    """
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or (abs(value) >= 1 and float(value).is_integer()):
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
