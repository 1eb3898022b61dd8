"""An evaluation of one or two models as plain JSON: what is printed, and written as evaluation.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepladder.evaluation.asked import Asked
from stepladder.evaluation.calibration import calibration
from stepladder.evaluation.compare import by_domain, compare
from stepladder.evaluation.curves import crossover, curve
from stepladder.evaluation.result import Evaluation, TaskSamples


@dataclass(frozen=True, slots=True)
class Played:
    """One model under one budget of sampled tokens per turn; None is the recipe's own."""

    model: str
    budget: int | None
    result: Evaluation


def summarised(played: Sequence[Played], asked: Asked) -> dict[str, Any]:
    """Return everything as plain JSON; two models are compared under each budget."""
    out: dict[str, Any] = {
        "environment": asked.environment,
        "split": asked.split,
        "tasks": asked.tasks,
        "samples": asked.samples,
        "beam": asdict(asked.beam) if asked.beam else None,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "played": [_one(p, asked) for p in played],
        "comparisons": [],
    }
    names = list(dict.fromkeys(p.model for p in played))
    if len(names) == 2:
        ours, others = ([p for p in played if p.model == name] for name in names)
        out["comparisons"] = [_two(a, b, asked.seed) for a, b in zip(ours, others, strict=True)]
    return out


def _one(played: Played, asked: Asked) -> dict[str, Any]:
    result = played.result
    curves = [curve(result.tasks, kind, asked.counts, seed=asked.seed) for kind in asked.kinds]
    failure = next((t.failure for t in result.trajectories if t.failure is not None), None)
    return {
        "model": played.model,
        "budget": played.budget,
        "success": result.success,
        "interval": list(result.interval),
        "curves": {c.kind: [asdict(point) for point in c.points] for c in curves},
        "failed": result.failed,
        "first_failure": None if failure is None else asdict(failure),
        "truncated": result.truncated,
        "episodes": result.episodes,
        "without_answer": result.without_answer,
        "tool_rate": result.tool_rate,
        "mean_tokens": result.mean_tokens,
        "calibration": asdict(calibration(result.tasks)) if asked.samples > 1 else None,
        "by_domain": {d: {"n": n, "success": solved / n} for d, (solved, n) in result.by_domain.items()},
        "by_task": [{"task": t.task, "solved": t.solved, "samples": len(t.samples)} for t in result.tasks],
        "seconds": result.seconds,
    }


def _two(one: Played, other: Played, seed: int) -> dict[str, Any]:
    ours, others = one.result.tasks, other.result.tasks
    return {
        "one": one.model,
        "other": other.model,
        "budget": one.budget,
        "overall": asdict(compare(ours, others, seed=seed)),
        "by_domain": {d: asdict(c) for d, c in by_domain(ours, others, seed=seed).items()},
        "passed": _passed(ours, others, seed) if len(ours[0].samples) > 1 else None,
    }


def _passed(one: Sequence[TaskSamples], other: Sequence[TaskSamples], seed: int) -> dict[str, Any]:
    """Compare pass@k of all samples, and say at which of all k the one behind at k = 1 has caught up."""
    n = len(one[0].samples)
    ours, others = (curve(tasks, "pass", range(1, n + 1), seed=seed) for tasks in (one, other))
    gap = ours.at(1).value - others.at(1).value
    return {
        "k": n,
        "last": asdict(compare(one, other, k=n, seed=seed)),
        "ahead": "one" if gap > 0 else "other" if gap < 0 else None,  # at k = 1
        "crossover": crossover(ours, others),
    }
