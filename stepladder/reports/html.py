"""A run as one HTML file that opens from disk: no script, no network, everything from a model escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stepladder.reports.alarms import alarm_rows
from stepladder.reports.charts import Chart, Points
from stepladder.reports.run import Record, RunData, read_run
from stepladder.reports.tables import (
    content_text,
    duration,
    families,
    interval_text,
    number,
    percent,
    rung_rows,
    task_id,
)

EXAMPLES_PER_RUNG = 4
_SHARE = (0.0, 1.0)
# key in metrics.jsonl: title, what to look for, fixed axis
KNOWN: dict[str, tuple[str, str, tuple[float, float] | None]] = {
    "reward": ("Reward", "mean over the batch; should rise", None),
    "success": ("Success", "training tasks; dots: held-out, 95 % interval", _SHARE),
    "tool_rate": ("Tool use", "share of episodes with a valid tool call", _SHARE),
    "loss": ("Loss", "in SFT it falls; in RL it says little", None),
    "validation_loss": ("Validation loss", "on demonstrations kept aside", None),
    "margin": ("Reward margin", "chosen over rejected; should rise from 0", None),
    "accuracy": ("Preference accuracy", "pairs whose chosen answer has the larger reward", _SHARE),
    "drift_chosen": ("Drift of chosen answers", "log p against the reference; far below 0 is bad", None),
    "drift_rejected": ("Drift of rejected answers", "log p against the reference; falls", None),
    "kl": ("KL", "to the reference; steady growth: the policy leaves it", None),
    "entropy": ("Entropy", "nats per token; near 0 nothing new is tried", None),
    "grad_norm": ("Gradient norm", "before clipping; spikes are a warning", None),
    "response_length": ("Response length", "sampled tokens per episode", None),
    "log_ratio_abs": ("Engine mismatch", "|behaviour - trainer| log-probability, nats per token", None),
    "tokens_per_second": ("Tokens per second", "sampled, whole step", None),
    "learning_rate": ("Learning rate", "", None),
}
_NOT_CURVES = ("step", "seed", "time")


@dataclass(frozen=True, slots=True)
class Phase:
    """The charts of one part of the run, such as sft or rl."""

    name: str
    steps: int
    charts: Sequence[Chart]
    more: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token for display; `probability` is None where the log-probability is unknown."""

    text: str
    probability: float | None


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a trajectory: who wrote it, and its text or its sampled tokens."""

    author: str
    text: str
    tokens: Sequence[Token]


def html_report(path: Path) -> str:
    """The page of a run folder. Raises DataError when `path` is none."""
    return html_page(read_run(path))


def html_page(run: RunData) -> str:
    """The page from what was read."""
    rows = rung_rows(run)
    environment = Environment(
        loader=PackageLoader("stepladder", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, interval=interval_text, duration=duration, number=number)
    return environment.get_template("page.html").render(
        name=run.path.resolve().name,
        rows=rows,
        families=families(rows),
        alarms=alarm_rows(run),
        phases=phases(run),
        examples=[
            (row, [_example(e) for e in row.examples[:EXAMPLES_PER_RUNG]]) for row in rows if row.examples
        ],
        facts=_facts(run),
        recipe=run.recipe,
        environment=json.dumps(run.environment, indent=2),
    )


def phases(run: RunData) -> list[Phase]:
    """The curves, phase by phase in the order of the run."""
    by_phase: dict[str, list[Record]] = {}
    for record in run.metrics:
        by_phase.setdefault(str(record.get("phase", "train")), []).append(record)
    return [_phase(run, name, records) for name, records in by_phase.items()]


def _phase(run: RunData, name: str, records: Sequence[Record]) -> Phase:
    keys = dict.fromkeys(key for record in records for key, value in record.items() if _is_number(value))
    present = [key for key in keys if key not in _NOT_CURVES]
    known = [_chart(run, name, key, records) for key in KNOWN if key in present]
    more = [_chart(run, name, key, records) for key in sorted(present) if key not in KNOWN]
    return Phase(name, len(records), known, more)


def _chart(run: RunData, phase: str, key: str, records: Sequence[Record]) -> Chart:
    title, hint, bounds = KNOWN.get(key, (key.replace("_", " "), "", None))
    curve = [
        (float(r.get("step", i)), float(r[key]) if _is_number(r.get(key)) else None)
        for i, r in enumerate(records)
    ]
    points, levels = None, []
    if key in ("success", "tool_rate"):
        own = [e for e in run.evaluations if e.get("rung") == phase and _is_number(e.get(key))]
        values = [_eval_point(e, key) for e in own if _is_number(e.get("step"))]
        points = Points("held-out", values) if values else None
        levels = [
            (row.rung, value)
            for row in rung_rows(run)
            if row.rung != phase and (value := getattr(row, key)) is not None
        ]
    return Chart(title, hint, curve, points, levels, bounds)


def _eval_point(record: Record, key: str) -> tuple[float, float, float, float]:
    value = float(record[key])
    low, high = (record.get("interval") or (value, value)) if key == "success" else (value, value)
    return float(record["step"]), value, float(low), float(high)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _facts(run: RunData) -> list[tuple[str, str]]:
    """A few lines about where and with what the run was made."""
    environment = run.environment
    packages = environment.get("packages") or {}
    git = environment.get("git") or {}
    found = {
        "device": environment.get("device"),
        "processor": environment.get("cpu"),
        "threads": environment.get("threads"),
        "torch": packages.get("torch"),
        "transformers": packages.get("transformers"),
        "git commit": (git.get("commit") or "")[:12] + (" (changed)" if git.get("changed") else ""),
    }
    return [(key, str(value)) for key, value in found.items() if value]


def _example(trajectory: Record) -> dict[str, Any]:
    score = trajectory.get("score") or {}
    return {
        "task": task_id(trajectory),
        "domain": str((trajectory.get("task") or {}).get("domain", "")),
        "score": score.get("value"),
        "parts": {str(k): v for k, v in (score.get("parts") or {}).items()},
        "stop_reason": str(trajectory.get("stop_reason", "")),
        "failure": trajectory.get("failure"),
        "blocks": blocks(trajectory),
    }


def blocks(trajectory: Mapping[str, Any]) -> list[Said]:
    """The messages of a trajectory. What the policy sampled is split into its tokens, where the record
    has their texts; an assistant message that was only shown to it (a worked example) is not."""
    turns = list(trajectory.get("turns") or [])
    messages = list(trajectory.get("messages") or [])
    sampled = sum(1 for message in messages if message.get("raw") is not None)
    out, turn = [], iter(turns if sampled == len(turns) else [])
    for message in messages:
        role = str(message.get("role", "user"))
        text = content_text(message.get("content"))
        if message.get("raw") is None:
            author = "example" if role == "assistant" else role
            out.append(Said(author if author in _AUTHORS else "user", text or _calls_text(message), ()))
        else:
            out.append(Said("policy", str(message["raw"]), _tokens(next(turn, {}))))
    return out


_AUTHORS = ("system", "user", "tool", "example", "policy")


def _calls_text(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    return "\n".join(f"{call.get('name')}({json.dumps(call.get('arguments'))})" for call in calls)


def _tokens(turn: Mapping[str, Any]) -> list[Token]:
    texts = turn.get("token_texts") or []
    logprobs = turn.get("logprobs") or [None] * len(texts)
    return [
        Token(str(text), None if logprob is None else math.exp(min(0.0, logprob)))
        for text, logprob in zip(texts, logprobs, strict=False)
    ]
