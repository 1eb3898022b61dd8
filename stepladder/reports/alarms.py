"""The alarms of a run as text: when, why, what to change, and what a remedy changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepladder.reports.run import RunData


@dataclass(frozen=True, slots=True)
class AlarmRow:
    """One alarm for display."""

    step: int
    name: str
    message: str
    evidence: str
    advice: str
    changed: str


def alarm_rows(run: RunData) -> Sequence[AlarmRow]:
    """The lines of alarms.jsonl, in order."""
    return [
        AlarmRow(
            step=int(record.get("step", 0)),
            name=str(record.get("name")),
            message=str(record.get("message")),
            evidence=", ".join(f"{k} {_number(v)}" for k, v in (record.get("evidence") or {}).items()),
            advice=str(record.get("advice")),
            changed=", ".join(
                f"rl.{key}: {before} -> {after}"
                for key, (before, after) in (record.get("changed") or {}).items()
            ),
        )
        for record in run.alarms
    ]


def alarm_text(run: RunData) -> str:
    """One paragraph an alarm; empty where there was none."""
    blocks = []
    for row in alarm_rows(run):
        lines = [
            f"ALARM {row.name} at step {row.step}: {row.message} ({row.evidence})",
            f"  {row.advice}",
        ]
        if row.changed:
            lines.append(f"  changed: {row.changed}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
