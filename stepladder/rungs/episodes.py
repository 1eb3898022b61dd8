"""What a batch of episodes says about the policy, and what the engine did for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepladder.engines.stats import Stats
from stepladder.errors import EngineError, EnvironmentFault
from stepladder.objectives.advantages import equal_within_float_noise
from stepladder.rungs.accumulate import Metrics
from stepladder.types import Group, Trajectory


def value_of(trajectory: Trajectory) -> float:
    """Return the score of a trajectory that has one."""
    assert trajectory.score.value is not None
    return trajectory.score.value


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """What the batch of episodes says about the policy, failures counted apart."""
    played = [t for g in groups for t in g.trajectories]
    whole = [t for t in played if t.failure is None]
    scored = [t for t in whole if t.score.value is not None]
    n = max(len(whole), 1)
    values = [[value_of(t) for t in g.trajectories if t in scored] for g in groups]
    metrics: Metrics = {
        "episodes": float(len(played)),
        "reward": sum(value_of(t) for t in scored) / max(len(scored), 1),
        "success": sum(t.solved for t in whole) / n,
        "tool_rate": sum(t.used_tool for t in whole) / n,
        "malformed_rate": sum(_malformed(t) for t in whole) / n,
        "truncated": sum(t.truncated for t in whole) / n,
        "failed": float(len(played) - len(whole)),
        "unscored": float(len(whole) - len(scored)),
        "turns": sum(len(t.turns) for t in whole) / n,
        "sampled_tokens": float(sum(t.num_sampled_tokens for t in whole)),
        "response_length": sum(t.num_sampled_tokens for t in whole) / n,
        "dead_groups": sum(equal_scores(v) for v in values) / max(len(groups), 1),
    }
    names = sorted({name for t in scored for name in t.score.parts})
    for name in names:
        parts = [t.score.parts[name] for t in scored if t.score.parts.get(name) is not None]
        metrics[f"reward/{name}"] = sum(p for p in parts if p is not None) / max(len(parts), 1)
    for name in sorted({t.task.domain.partition("/")[0] for t in whole if "/" in t.task.domain}):
        of = [t for t in whole if t.task.domain.startswith(f"{name}/")]
        metrics[f"success/{name}"] = sum(t.solved for t in of) / len(of)
    return metrics


def refuse_dead_world(
    groups: Sequence[Group], *, again: str = "`stepladder resume` plays their tasks anew"
) -> None:
    """Every episode failed: there is nothing to learn from, and going on would hide the cause.

    `again` says what to do once the cause is gone.
    """
    played = [t for g in groups for t in g.trajectories]
    failures = [t.failure for t in played if t.failure is not None]
    if failures and len(failures) == len(played):
        first = failures[0]
        what = (
            f"all {len(played)} episodes of this step failed; the first at the {first.boundary}: "
            f"{first.message}\nNothing was trained on them; "
        )
        if first.boundary == "engine":
            raise EngineError(f"{what}once it serves again, {again}")
        raise EnvironmentFault(f"{what}run `stepladder check-env` on the environment; {again}")


def engine_metrics(stats: Stats) -> Metrics:
    return {
        "tokens_per_second": stats.tokens_per_second,
        "rows_per_step": stats.rows_per_step,
        "prefill_computed": float(stats.prefill_computed),
        "prefill_saved": float(stats.prefill_saved),
    }


def _malformed(trajectory: Trajectory) -> bool:
    return any(call.error is not None for m in trajectory.messages for call in m.tool_calls)


def equal_scores(values: Sequence[float]) -> bool:
    """Has this group nothing to tell its members apart? By the rule that makes advantages exactly 0."""
    if len(values) < 2:
        return True
    rewards = torch.tensor(values, dtype=torch.float64)
    return bool(equal_within_float_noise(rewards.min(), rewards.max(), rewards.mean()))
