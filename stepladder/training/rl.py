"""Reinforcement learning, synchronous: sample groups, turn rewards into advantages, update, sync, repeat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepladder.algorithms import Algorithm
from stepladder.engines.request import Stats
from stepladder.errors import EnvironmentFault
from stepladder.evaluation import solved, used_tool
from stepladder.objectives.advantages import constant_advantages, group_advantages
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.rollout import rollout
from stepladder.sections.rl import RlSection
from stepladder.training.interrupt import uninterrupted
from stepladder.training.setup import Workbench
from stepladder.training.step import Metrics, RlBatch, check_on_policy, rl_update
from stepladder.training.tasks import TaskSampler
from stepladder.types import Group, Trajectory


@dataclass(slots=True)
class RlState:
    """Where the loop stands besides weights, moments and the sampler."""

    step: int = 0
    seconds: float = 0.0
    history: list[float] = field(default_factory=list)  # success of the last steps

    def plain(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": self.seconds, "history": self.history[-20:]}


def run_rl(
    bench: Workbench,
    optimizer: MasterOptimizer,
    sampler: TaskSampler,
    settings: RlSection,
    state: RlState,
    *,
    seed: int,
    on_step: Callable[[int, Metrics, Sequence[Group]], None],
    on_trajectory: Callable[[Trajectory], None] | None = None,
    reference: Policy | None = None,
) -> RlState:
    """Run until `steps`, the success asked for, or the minutes are used up.

    `on_step(step, metrics, groups)` is called after each update with the engine already on the new
    weights: the place for logs, evaluations and checkpoints.
    """
    row = settings.row()
    temperature = bench.recipe.rollout.temperature
    while state.step < settings.steps and not _finished(settings, state):
        with _drawn_again(sampler, state):
            began = time.monotonic()
            bench.engine.stats()  # what an evaluation did is not this step's
            groups = bench.runner.run(
                rollout(
                    bench.agents(temperature),
                    bench.world,
                    sampler.next(settings.tasks_per_step),
                    group_size=settings.group_size,
                    limits=bench.limits,
                    seed=seed,
                    scorer=bench.scorer,
                    on_trajectory=on_trajectory,
                )
            )
            sampled_at = time.monotonic()
            with uninterrupted():
                refuse_dead_world(groups)
                batch = make_batch(groups, row)
                metrics = rollout_metrics(groups)
                metrics |= _engine_metrics(bench.engine.stats())
                metrics |= _updates(bench, optimizer, batch, row, settings, state, temperature, reference)
                updated_at = time.monotonic()
                bench.engine.sync(bench.engine.version + 1)
                for group in groups:
                    whole = [t for t in group.trajectories if t.failure is None]
                    if whole:  # a group that failed as a whole says nothing about its domain
                        sampler.observe(group.task.domain, sum(map(solved, whole)) / len(whole))
                state.step += 1
                state.history.append(metrics["success"])
                done = time.monotonic()
                state.seconds += done - began
                metrics |= {
                    "seconds": done - began,
                    "seconds_rollout": sampled_at - began,
                    "seconds_update": updated_at - sampled_at,
                    "seconds_sync": done - updated_at,
                }
                on_step(state.step, metrics, groups)
    return state


@contextlib.contextmanager
def _drawn_again(sampler: TaskSampler, state: RlState) -> Iterator[None]:
    """Give tasks back that no finished step has learned from, so that a resumed run draws them again."""
    step, drawn_from = state.step, sampler.state()
    try:
        yield
    except BaseException:
        if state.step == step:
            sampler.load(drawn_from)
        raise


def _updates(
    bench: Workbench,
    optimizer: MasterOptimizer,
    batch: RlBatch,
    row: Algorithm,
    settings: RlSection,
    state: RlState,
    temperature: float,
    reference: Policy | None,
) -> Metrics:
    """`updates_per_batch` optimiser steps; the first proves that the sampler was the model being trained."""
    exact = bench.engine.dtype == torch.float32 and bench.policy.dtype == torch.float32
    correction = settings.correction
    if correction == "auto":
        correction = "none" if exact else "token_cap"
    rate = warmup_then_constant(state.step, peak=settings.learning_rate, warmup=settings.warmup_steps)
    metrics: Metrics = {"learning_rate": rate}
    if not batch.samples:
        return {**metrics, "updated": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0}

    def on_policy(measured: Metrics) -> None:
        check_on_policy(measured, exact_limit=1e-3 if exact else None, mean_limit=0.25)

    for update in range(settings.updates_per_batch):
        got = rl_update(
            bench.policy,
            optimizer,
            batch,
            row,
            learning_rate=rate,
            temperature=temperature,
            token_budget=settings.token_budget,
            correction=correction,
            constant=float(bench.recipe.rollout.max_tokens * bench.limits.max_turns),
            reference=reference,
            before_step=on_policy if update == 0 else None,
        )
        if update == 0:
            metrics |= got
        else:  # the ratio and the clips only mean something once the weights have moved
            metrics |= {k: v for k, v in got.items() if k.startswith(("ratio", "clip", "approx_kl"))}
        if not got["updated"]:
            break
    metrics["trained_tokens"] = metrics.pop("tokens", 0.0)
    return metrics


def make_batch(groups: Sequence[Group], row: Algorithm) -> RlBatch:
    """Rewards to advantages to rows. Failed and unscored trajectories take no part, and count for nothing.

    Neither do episodes in which the policy said nothing (no room for a single token). A group with fewer
    than two members left has no baseline and is left out.
    """
    trajectories: list[Trajectory] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        usable = [t for t in group.trajectories if _usable(t)]
        if len(usable) >= 2 or row.advantage == "constant":
            trajectories += usable
            group_of += [g] * len(usable)
    empty = torch.zeros(0)
    if not trajectories:
        return RlBatch([], empty, empty.long(), empty.long())
    rewards = torch.tensor([_value(t) for t in trajectories], dtype=torch.float64)
    index = torch.tensor(group_of)
    if row.advantage == "constant":
        advantages = constant_advantages(rewards)
    else:
        advantages = group_advantages(rewards, index, baseline=row.baseline, scale=row.scale, ddof=row.ddof)
    samples, owner = [], []
    for i, trajectory in enumerate(trajectories):
        for sample in trajectory.samples:
            if sample.num_trained:
                samples.append(sample)
                owner.append(i)
    owners = torch.tensor(owner, dtype=torch.long)
    return RlBatch(samples, advantages.float()[owners], owners, index[owners])


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """What the batch of episodes says about the policy, failures counted apart."""
    played = [t for g in groups for t in g.trajectories]
    whole = [t for t in played if t.failure is None]
    scored = [t for t in whole if t.score.value is not None]
    n = max(len(whole), 1)
    values = [[_value(t) for t in g.trajectories if t in scored] for g in groups]
    metrics: Metrics = {
        "reward": sum(_value(t) for t in scored) / max(len(scored), 1),
        "success": sum(solved(t) for t in whole) / n,
        "tool_rate": sum(used_tool(t) for t in whole) / n,
        "malformed_rate": sum(_malformed(t) for t in whole) / n,
        "truncated": sum(t.truncated for t in whole) / n,
        "failed": float(len(played) - len(whole)),
        "unscored": float(len(whole) - len(scored)),
        "turns": sum(len(t.turns) for t in whole) / n,
        "sampled_tokens": float(sum(t.num_sampled_tokens for t in whole)),
        "response_length": sum(t.num_sampled_tokens for t in whole) / n,
        "dead_groups": sum(_equal(v) for v in values) / max(len(groups), 1),
    }
    names = sorted({name for t in scored for name in t.score.parts})
    for name in names:
        parts = [t.score.parts[name] for t in scored if t.score.parts.get(name) is not None]
        metrics[f"reward/{name}"] = sum(p for p in parts if p is not None) / max(len(parts), 1)
    return metrics


def refuse_dead_world(groups: Sequence[Group]) -> None:
    """Every episode failed: there is nothing to learn from, and going on would hide the cause."""
    played = [t for g in groups for t in g.trajectories]
    failures = [t.failure for t in played if t.failure is not None]
    if failures and len(failures) == len(played):
        first = failures[0]
        raise EnvironmentFault(
            f"all {len(played)} episodes of this step failed; the first at the {first.boundary}: "
            f"{first.message}. Nothing was trained on them; run `stepladder check-env` on the environment"
        )


def _engine_metrics(stats: Stats) -> Metrics:
    return {
        "tokens_per_second": stats.tokens_per_second,
        "rows_per_step": stats.rows_per_step,
        "prefill_computed": float(stats.prefill_computed),
        "prefill_saved": float(stats.prefill_saved),
    }


def _finished(settings: RlSection, state: RlState) -> bool:
    if settings.max_minutes is not None and state.seconds >= settings.max_minutes * 60:
        return True
    recent = state.history[-5:]
    wanted = settings.stop_at_success
    return wanted is not None and len(recent) == 5 and sum(recent) / 5 >= wanted


def _usable(trajectory: Trajectory) -> bool:
    scored = trajectory.failure is None and trajectory.score.value is not None
    return scored and any(sample.num_trained for sample in trajectory.samples)


def _value(trajectory: Trajectory) -> float:
    assert trajectory.score.value is not None
    return trajectory.score.value


def _malformed(trajectory: Trajectory) -> bool:
    return any(call.error is not None for m in trajectory.messages for call in m.tool_calls)


def _equal(values: Sequence[float]) -> bool:
    return len(values) < 2 or max(values) - min(values) <= 1e-6 * max(1.0, abs(sum(values) / len(values)))
