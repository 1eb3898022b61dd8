"""Reinforcement learning, synchronous: sample groups, turn rewards into advantages, update, sync, repeat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepladder.algorithms import Algorithm
from stepladder.errors import EnvironmentFault
from stepladder.evaluation import solved
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.rollout import rollout
from stepladder.sections.rl import RlSection
from stepladder.training.credit import make_batch
from stepladder.training.interrupt import uninterrupted
from stepladder.training.reference import frozen_reference
from stepladder.training.rl_metrics import engine_metrics, rollout_metrics
from stepladder.training.rl_step import RlBatch, check_on_policy, rl_update
from stepladder.training.rung import Run, Rung
from stepladder.training.setup import Workbench
from stepladder.training.step import Metrics
from stepladder.training.tasks import TaskSampler
from stepladder.types import Group, Trajectory

REFERENCE = "reference.safetensors"


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
                metrics |= engine_metrics(bench.engine.stats())
                metrics |= _updates(bench, optimizer, batch, row, settings, state, temperature, reference)
                updated_at = time.monotonic()
                bench.sync()
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
    exact = bench.engine.in_process and bench.engine.dtype == bench.policy.dtype == torch.float32
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


def _finished(settings: RlSection, state: RlState) -> bool:
    if settings.max_minutes is not None and state.seconds >= settings.max_minutes * 60:
        return True
    recent = state.history[-5:]
    wanted = settings.stop_at_success
    return wanted is not None and len(recent) == 5 and sum(recent) / 5 >= wanted


class RlRung(Rung):
    """Reinforcement learning in the recipe's environment."""

    name: ClassVar[str] = "rl"
    syncs_engine: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = RlState()
        settings = run.recipe.rl
        assert settings is not None
        self.settings = settings
        self.sampler = TaskSampler(run.bench.world, "train", mode=settings.sampling, seed=run.recipe.run.seed)

    @property
    def step(self) -> int:
        return self.progress.step

    def climb(self) -> None:
        run, settings = self.run, self.settings
        reference = None
        if settings.row().kl_in == "loss":
            path = run.folder.path / REFERENCE
            reference = frozen_reference(run.bench.policy, path, must_exist=self.step > 0)
        with self.training(run.bench.policy.model, settings.max_grad_norm) as optimizer:
            run.display.start("rl", settings.steps, self.step)
            run_rl(
                run.bench,
                optimizer,
                self.sampler,
                settings,
                self.progress,
                seed=run.recipe.run.seed,
                on_step=self._on_step,
                on_trajectory=run.display.trajectory,
                reference=reference,
            )

    def _on_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        run, settings = self.run, self.settings
        run.log("rl", step, metrics)
        played = [t for group in groups for t in group.trajectories]
        run.folder.log_trajectories(played, step=step, phase="rl")
        if settings.evaluate_every and step % settings.evaluate_every == 0 and step < settings.steps:
            with run.display.aside():
                run.evaluate(f"rl-{step}", step, run.recipe.evaluation.tasks, keep=0)
        if step % run.recipe.run.checkpoint_every == 0:
            run.save()

    def state(self) -> dict[str, Any]:
        return {**self.progress.plain(), "sampler": self.sampler.state()}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.progress = RlState(**{k: v for k, v in state.items() if k != "sampler"})
        self.sampler.load(state["sampler"])
        self.load_optimizer(tensors, self.run.bench.policy.model, self.settings.max_grad_norm)
