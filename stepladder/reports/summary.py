"""The end of a run as plain text, for a terminal or a log."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepladder.reports.alarms import alarm_text
from stepladder.reports.fits import fit_texts
from stepladder.reports.run import RunData, read_run
from stepladder.reports.scoring import scoring_texts
from stepladder.reports.tables import (
    NONE,
    RungRow,
    StepUp,
    content_text,
    duration,
    example_pair,
    families,
    interval_text,
    percent,
    rung_rows,
    steps_up,
    task_id,
)

WIDTH = 100
MESSAGE_LIMIT = 600  # characters of one message shown; the page has all of it


def summarise(path: Path, report: Path | None = None) -> str:
    """The summary of a run folder. Raises DataError when `path` is none."""
    return summary_text(read_run(path), report)


def summary_text(run: RunData, report: Path | None = None) -> str:
    """Rungs with intervals, families, one trajectory before and one after, and where the report lies."""
    rows = rung_rows(run)
    blocks = [_rungs(rows) if rows else "No evaluation was made in this run."]
    if ups := steps_up(rows):
        blocks.append(_steps_up(ups))
    if families(rows):
        blocks.append(_families(rows))
    pair = example_pair(rows)
    if pair:
        for when, (row, example) in zip(("Before", "After"), pair, strict=True):
            blocks.append(_trajectory(f"{when} ({row.label}), task {task_id(example)}", example))
    if alarms := alarm_text(run):
        blocks.append(printable(alarms))
    if run.data:
        lines = [printable(f"{rung}: {facts.get('text', '')}") for rung, facts in run.data.items()]
        blocks.append("\n".join(["Data", *(textwrap.fill(line, WIDTH) for line in lines)]))
    blocks += scoring_texts(run.path)
    if memory := _memory(run):
        blocks.append(memory)
    if trained := _trained(run):
        blocks.append(trained)
    if fits := fit_texts(run):
        blocks.append(printable("\n".join(fits)))
    if tasks := _tasks(run):
        blocks.append(tasks)
    blocks.append(f"Report: {report or run.path / 'report.html'}")
    return "\n\n".join(blocks) + "\n"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with the first column left, the others right.

    >>> print(text_table(["a", "b"], [["x", "10"], ["yy", "2"]]))
    a    b
    -- ---
    x   10
    yy   2
    """
    widths = [max(len(str(row[i])) for row in [headers, *rows]) for i in range(len(headers))]
    widths = [width + (1 if i else 0) for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = cells
        out = [first.ljust(widths[0])]
        return " ".join(out + [cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)]).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


def printable(text: str) -> str:
    """Text from a model made safe for a terminal: control and direction characters are shown as escapes.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _rungs(rows: Sequence[RungRow]) -> str:
    headers = ["", "held-out success", "95 % interval", "n", "uses a tool", "time"]
    cells = [
        [
            printable(row.label),
            percent(row.success),
            interval_text(row.interval),
            str(row.n),
            percent(row.tool_rate),
            duration(row.seconds),
        ]
        for row in rows
    ]
    temperatures = {row.temperature for row in rows if row.temperature is not None}
    if not temperatures:
        return text_table(headers, cells)
    names = ", ".join("0 (greedy)" if t == 0 else f"{t:g}" for t in sorted(temperatures))
    return f"{text_table(headers, cells)}\nSampled at temperature {names}."


def _steps_up(ups: Sequence[StepUp]) -> str:
    """A rung that does not help is shown as it is."""
    cells = []
    for up in ups:
        difference = f"{100 * (up.better - up.worse) / up.n:+.1f} points"
        numbers = [difference, str(up.better), str(up.worse), f"{up.p:.2g}"]
        cells.append([f"{up.rung} after {up.before}", *numbers])
    headers = ["on the same tasks", "difference", "newly solved", "no longer", "p (sign test)"]
    return text_table(headers, cells)


def _families(rows: Sequence[RungRow]) -> str:
    """Success per family, a column per rung."""
    shown = [row for row in rows if row.by_domain]
    cells = []
    for family in families(rows):
        found = [row.by_domain.get(family, (None, 0)) for row in shown]
        sizes = sorted({n for _, n in found if n})
        size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" if sizes else NONE
        cells.append([printable(family), *(percent(success) for success, _ in found), size])
    return text_table(["success by family", *(printable(row.rung) for row in shown), "n"], cells)


def _trajectory(title: str, trajectory: Mapping[str, Any]) -> str:
    lines = [printable(title)]
    for message in trajectory.get("messages") or []:
        text = message.get("raw") or content_text(message.get("content"))
        lines += _message(str(message.get("role")), text)
    score = (trajectory.get("score") or {}).get("value")
    outcome = "not scored" if score is None else f"score {score:g}"
    if failure := trajectory.get("failure"):
        outcome += f", failed in the {failure.get('boundary')}: {failure.get('message')}"
    lines.append(printable(f"  -> {outcome} ({trajectory.get('stop_reason')})"))
    return "\n".join(lines)


def _message(role: str, text: str) -> list[str]:
    cut = len(text) - MESSAGE_LIMIT
    if cut > 0:
        text = f"{text[:MESSAGE_LIMIT]} [... {cut} more characters]"
    head = f"  {printable(role):>9}: "
    out: list[str] = []
    for line in printable(text).split("\n"):
        out += textwrap.wrap(line, WIDTH - len(head), break_on_hyphens=False) or [""]
    return [(head if i == 0 else " " * len(head)) + line for i, line in enumerate(out)]


def _memory(run: RunData) -> str:
    """Where memory ran out, and how many tokens a micro-batch has had since."""
    lines, now = [], None
    for record in run.metrics:
        tokens = record.get("token_budget")
        if isinstance(tokens, int | float) and (now is None or tokens < now):
            where = f"{printable(str(record.get('phase', 'train')))} step {record.get('step')}"
            lines.append(f"Memory ran out at {where}: micro-batches of {tokens:.0f} tokens from there on.")
            now = tokens
    return "\n".join(lines)


def _trained(run: RunData) -> str:
    """How many steps each phase took; a validation has a line of its own, with the step it came after."""
    steps: dict[str, set[Any]] = {}
    for record in run.metrics:
        steps.setdefault(str(record.get("phase", "train")), set()).add(record.get("step"))
    return ", ".join(
        f"{printable(phase)}: {len(seen)} step{'s' * (len(seen) != 1)}" for phase, seen in steps.items()
    )


def _tasks(run: RunData) -> str:
    """Where every task that RL drew is, and how many episodes failed."""
    steps = [record for record in run.metrics if "tasks_drawn" in record]
    if not steps:
        return ""
    drawn, trained, discarded, waiting = (
        f"{steps[-1][f'tasks_{name}']:.0f}" for name in ("drawn", "trained", "discarded", "waiting")
    )
    failed, played = (sum(record[name] for record in steps) for name in ("failed", "episodes"))
    return (
        f"rl tasks: {drawn} drawn, {trained} trained on, {discarded} discarded, {waiting} waiting; "
        f"{failed:.0f} of {played:.0f} episodes failed"
    )
