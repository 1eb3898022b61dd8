"""A plan as plain text: what is estimated, what was measured, and what to change where it does not fit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from stepladder.planning.advice import fits
from stepladder.planning.machine import Machine
from stepladder.planning.measured import Measured
from stepladder.planning.plan import Plan, RungPlan
from stepladder.reports.summary import printable, text_table
from stepladder.reports.tables import duration

WIDTH = 100


def plan_text(
    name: str,
    plan: Plan,
    machine: Machine,
    *,
    advice: Mapping[str, str],
    measured: Mapping[str, Measured],
) -> str:
    """The whole plan. `advice`: by the rungs that do not fit; `measured`: by the rungs that have run."""
    shape = plan.shape
    head = [
        f"{name}: {plan.model} on {plan.device}, {plan.dtype}",
        f"{shape.parameters:,} parameters, of which {shape.embedding + shape.output:,} embeddings ("
        + ("one matrix for input and output)" if shape.tied else "input and output apart)")
        + (f"; an adapter of {plan.lora:,}" if plan.lora else ""),
    ]
    blocks = ["\n".join(printable(line) for line in head)]
    for rung in plan.rungs:
        blocks.append(_rung(rung, machine, advice.get(rung.name), measured.get(rung.name)))
    blocks.append(_said(machine, plan.dtype))
    return "\n\n".join(blocks) + "\n"


def _rung(rung: RungPlan, machine: Machine, advice: str | None, measured: Measured | None) -> str:
    when = {"always": "", "update": "in an update", "play": "while playing"}
    rows = [[p.name, f"{p.bytes / 1e9:.2f}", when[p.phase], p.basis] for p in rung.parts]
    held = "the larger of updating and playing" if any(p.phase == "play" for p in rung.parts) else "the sum"
    rows.append(["peak, estimated", f"{rung.peak / 1e9:.2f}", "", held])
    lines = [
        f"{rung.name}: trains {rung.trainable:,} parameters, {rung.frozen:,} stay as they are",
        _table(["memory", "GB", "when", "how it is counted"], rows),
    ]
    free = f"{machine.free / 1e9:.2f} GB are free ({machine.source}, {machine.total / 1e9:.2f} GB in all)"
    if fits(rung.peak, machine.free):
        lines.append(f"Fits: {free}.")
    else:
        lines.append(f"WILL NOT FIT: {free}; {advice}." if advice else f"WILL NOT FIT: {free}.")
    lines.append(_time(rung))
    if measured is not None:
        lines.append(measured.sentence())
    lines += [f"Note: {note}." for note in rung.notes]
    return "\n".join(
        line if "\n" in line else textwrap.fill(printable(line), WIDTH, subsequent_indent="  ")
        for line in lines
    )


def _time(rung: RungPlan) -> str:
    if rung.seconds is None:
        return f"A step: at most {rung.tokens:,} tokens."
    step = f"A step: at most {rung.tokens:,} tokens, about {duration(rung.seconds)} (estimated)"
    if rung.steps is None:
        return f"{step}; how many steps there are, the data says."
    return f"{step}; at most {rung.steps:,} steps: {duration(rung.seconds * rung.steps)}."


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First and last columns to the left, the others to the right."""
    lines = text_table(headers[:-1], [row[:-1] for row in rows]).split("\n")
    width = max(map(len, lines))
    last = [headers[-1], "", *(row[-1] for row in rows)]
    return "\n".join(f"{line.ljust(width)}  {text}".rstrip() for line, text in zip(lines, last, strict=True))


def _said(machine: Machine, dtype: str) -> str:
    text = (
        f"Measured just now: {machine.flops / 1e9:,.0f} GFLOP/s of matrix products in {dtype}, "
        f"{machine.bandwidth / 1e9:,.1f} GB/s of copies, the free memory. Everything else is estimated from "
        "the recipe and the model's config.json; tokens are the most that the recipe allows, so a run with "
        "shorter data takes less. docs/plan.md has the formulas"
    )
    return textwrap.fill(text + ".", WIDTH)
