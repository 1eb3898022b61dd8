"""Reinforcement learning, synchronous: collect groups, credit them, update, sync, log, repeat."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepladder.errors import NothingToLearn
from stepladder.objectives.corrections import Correction
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.recipe.rl import RlSection
from stepladder.run.interrupt import uninterrupted
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.episodes import engine_metrics, refuse_dead_world, rollout_metrics
from stepladder.rungs.rl.collect import DRY_STEPS, Collected, Draw, nothing_to_learn
from stepladder.rungs.rl.collect import collect as collect_groups
from stepladder.rungs.rl.credit import MeasuredColumns, make_batch
from stepladder.rungs.rl.critic import Critic, explained_variance
from stepladder.rungs.rl.group_stream import GroupStream
from stepladder.rungs.rl.replay import Replay
from stepladder.rungs.rl.shaping import shaped
from stepladder.rungs.rl.state import RlState, adapt_kl, credit_rules, entropy_bonus, horizon, shaping_rules
from stepladder.rungs.rl.update import RlBatch, UpdateRules, check_on_policy, reference_kl, rl_update
from stepladder.rungs.rl.watch.watch import Watch
from stepladder.rungs.tasks import TaskSampler, drawn_again
from stepladder.types import Group, Trajectory
from stepladder.workbench.bench import Workbench
from stepladder.workbench.memory import MemoryLimit

log = logging.getLogger("stepladder")


@dataclass
class RlParts:
    """What the loop works with. `reference` with a KL term, `critic` where the algorithm has one."""

    bench: Workbench
    optimizer: MasterOptimizer
    sampler: TaskSampler
    settings: RlSection
    state: RlState
    seed: int
    reference: Policy | None = None
    critic: Critic | None = None
    stream: GroupStream | None = None  # with max_staleness: groups that are played meanwhile
    finished: dict[str, Group] = field(default_factory=dict)  # by id; played before, for the first step only
    own_advantage: Callable[..., Any] | None = None
    own_loss: Callable[..., Any] | None = None
    watch: Watch | None = None  # checks batches and syncs, and holds the settings in force; made if missing
    replay: Replay | None = None  # demonstrations whose SFT loss is mixed into every update
    on_trajectory: Callable[[Trajectory], None] | None = None
    between: Callable[[int], None] = lambda step: None
    on_refresh: Callable[[int], None] = lambda step: None  # the policy of now becomes the reference


def run_rl(parts: RlParts, *, on_step: Callable[[int, Metrics, Sequence[Group]], None]) -> RlState:
    """Run until `steps`, the success asked for, or the minutes are used up.

    `on_step(step, metrics, groups)` is called after each update with the engine already on the new
    weights: the place for logs and checkpoints. `parts.between(step)` is called before the next one, where
    a Ctrl-C is acted on at once: the place for evaluations. A resumed run calls it again.
    """
    state, bench = parts.state, parts.bench
    watch = parts.watch = parts.watch or Watch(bench, parts.settings, reference=parts.reference)
    while state.step < parts.settings.steps and not _finished(parts.settings, state):
        parts.between(state.step)
        try:
            with drawn_again(parts.sampler if parts.stream is None else None, lambda: state.step):
                began = time.monotonic()
                parts.settings = watch.settings
                collected = collect(parts)
                if not collected.played:
                    log.info("RL ends after %d steps: the tasks of all epochs are played", state.step)
                    break
                sampled_at = time.monotonic()
                with uninterrupted():
                    groups, batch = credit(parts, collected)
                    metrics = rollout_metrics(groups) | collected.metrics
                    metrics |= engine_metrics(bench.engine.stats())
                    metrics |= watch.sampled(state.step, groups, batch.samples)
                    if parts.stream is None:
                        bench.engine.rest()
                    metrics |= update(parts, batch, stale=metrics["version_lag_max"] > 0)
                    updated_at = time.monotonic()
                    bench.sync()
                    metrics |= watch.synced(metrics)
                    remember(parts, groups, metrics)
                    metrics |= account(parts, groups, batch)
                    done = time.monotonic()
                    state.seconds += done - began
                    metrics |= {
                        "seconds": done - began,
                        "seconds_rollout": sampled_at - began,
                        "seconds_update": updated_at - sampled_at,
                        "seconds_sync": done - updated_at,
                    }
                    on_step(state.step, metrics, groups)
        except NothingToLearn as end:
            if not end.all_solved:
                raise
            log.warning("RL ends after %d steps: %s", state.step, end)
            break
    return state


# -- the phases ----------------------------------------------------------------------------------------------


def collect(parts: RlParts) -> Collected:
    """Play the step's groups, and choose those that are trained on."""
    bench, settings = parts.bench, parts.settings
    bench.engine.stats()  # what an evaluation did is not this step's
    turns = horizon(settings, parts.state, bench.limits.max_turns)
    stream = parts.stream

    def play(tasks: Draw) -> list[Group]:
        if stream is not None:
            groups = bench.runner.run(stream.take())
        else:
            done = [parts.finished[name] for name, _ in tasks if name in parts.finished]
            groups = done + bench.play(
                [(name, task) for name, task in tasks if name not in parts.finished],
                group_size=settings.group_size,
                max_turns=turns,
                seed=parts.seed,
                on_trajectory=parts.on_trajectory,
            )
        refuse_dead_world(groups)
        return groups

    got = collect_groups(
        play,
        parts.sampler.next if stream is None else lambda n: [],  # the stream draws for itself
        groups=settings.tasks_per_step,
        dynamic=settings.row().dynamic_sampling,
        max_refills=settings.tasks.max_refills,
        keep=settings.tasks.keep_groups,
    )
    if got.metrics.get("groups_kept") == 0 and parts.state.dry + 1 >= DRY_STEPS:
        raise nothing_to_learn(got.played)
    return got


def credit(parts: RlParts, collected: Collected) -> tuple[list[Group], RlBatch]:
    """(every group played, with bonuses in its scores; the batch that the kept ones make)."""
    settings, state = parts.settings, parts.state
    row = settings.row()
    groups = shaped(collected.played, shaping_rules(settings, state, parts.bench.recipe.rollout.max_tokens))

    def measure(batch: RlBatch) -> MeasuredColumns:
        measured = MeasuredColumns()
        if row.kl_in == "reward" and parts.reference is not None:
            measured.kl = reference_kl(
                batch,
                parts.reference,
                temperature=parts.bench.recipe.rollout.temperature,
                token_budget=settings.token_budget,
            )
        if parts.critic is not None:
            measured.values, measured.final_values = parts.critic.judge(batch)
        return measured

    rules = credit_rules(settings, state, parts.own_advantage)
    return groups, make_batch([groups[i] for i in collected.kept], row, rules, measure=measure)


def update(parts: RlParts, batch: RlBatch, *, stale: bool = False) -> Metrics:
    """`updates_per_batch` optimiser steps; the first proves that the sampler was the model being trained.

    With `stale` tokens there is nothing to prove: their ratio is not 1, and should not be.
    """
    settings, state, critic = parts.settings, parts.state, parts.critic
    rate = warmup_then_constant(state.step, peak=settings.learning_rate, warmup=settings.warmup_steps)
    metrics: Metrics = {"learning_rate": rate, **batch.measured}
    if not batch.samples:
        return {**metrics, "updated": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0}
    rules, exact = update_rules(parts)
    if settings.entropy.target is not None:
        metrics["entropy_coefficient"] = rules.entropy_coefficient
    waiting = critic is not None and state.step < critic.settings.warmup_steps
    if waiting:  # the policy stays as it is; that the sampler was this policy is proven all the same
        still = dataclasses.replace(rules.row, kl_in="none")
        rules = dataclasses.replace(rules, row=still, entropy_coefficient=0.0)
        shown = dataclasses.replace(batch, advantages=torch.zeros(len(batch.samples)))
    else:
        shown = batch
    also = critic.loss(batch, coefficient=critic.settings.coefficient) if critic and critic.shared else None

    def on_policy(measured: Metrics) -> None:
        limit, watch = (1e-3 if exact else None), parts.watch
        cause = None if watch is None else lambda: watch.cause(batch.samples)
        check_on_policy(measured, exact_limit=limit, mean_limit=0.25, cause=cause)

    for k in range(1 if waiting else settings.updates_per_batch):

        def once(tokens: int, k: int = k) -> Metrics:
            replay = parts.replay
            return rl_update(
                parts.bench.policy,
                parts.optimizer,
                shown,
                dataclasses.replace(rules, token_budget=tokens),
                learning_rate=rate,
                reference=parts.reference,
                also=also,
                replay=replay.at(state.step, k, tokens) if replay and not waiting else None,
                before_step=on_policy if k == 0 and not stale else None,
            )

        got = parts.bench.memory.fit(batch.samples, rules.token_budget, parts.optimizer, once)
        if k == 0:
            metrics |= got
        else:  # the ratio and the clips only mean something once the weights have moved
            metrics |= {n: v for n, v in got.items() if n.startswith(("ratio", "clip", "approx_kl"))}
        if not got["updated"]:
            break
    metrics["trained_tokens"] = metrics.pop("tokens", 0.0)
    if critic is not None:
        metrics |= update_critic(critic, batch, settings, parts.bench.memory)
    return metrics


def update_critic(critic: Critic, batch: RlBatch, settings: RlSection, memory: MemoryLimit) -> Metrics:
    """Its own optimiser steps where the trunk is its own; what it knew before them in any case."""
    metrics: Metrics = {"explained_variance": explained_variance(batch)}
    if critic.optimizer is not None:
        rate = critic.settings.learning_rate
        for _ in range(critic.settings.updates_per_batch or settings.updates_per_batch):
            metrics |= memory.fit(
                batch.samples,
                critic.token_budget,
                critic.optimizer,
                lambda tokens: critic.update(batch, rate=rate, token_budget=tokens),
            )
    return metrics


def remember(parts: RlParts, groups: Sequence[Group], metrics: Metrics) -> None:
    """What this step leaves for the next: solve rates, coefficients, the reference where it is due."""
    state, settings = parts.state, parts.settings
    parts.finished.clear()  # what is left of it was sampled with the weights before this update
    for group in groups:
        whole = [t for t in group.trajectories if t.failure is None]
        if whole:  # a group that failed as a whole says nothing about its task
            parts.sampler.saw(group.task, sum(t.solved for t in whole) / len(whole))
    if "kl_reward" in metrics:
        metrics["kl_coefficient"] = credit_rules(settings, state).kl_coefficient
        adapt_kl(settings, state, metrics["kl_reward"], sum(len(g.trajectories) for g in groups))
    state.dry = state.dry + 1 if metrics.get("groups_kept") == 0 else 0
    state.entropy = metrics.get("entropy", state.entropy)
    state.tool_rate = metrics["tool_rate"]
    state.step += 1
    state.history.append(metrics["success"])
    every = settings.kl.reference_every
    if every and state.step % every == 0:
        state.reference_step = state.step
        parts.on_refresh(state.step)


def account(parts: RlParts, groups: Sequence[Group], batch: RlBatch) -> Metrics:
    """Where every task drawn so far is: trained on, discarded, or begun and still to come.

    The step is over: a stream begins others from here on.
    """
    state, stream = parts.state, parts.stream
    trained = len({sample.group_id for sample in batch.samples})
    state.tasks_trained += trained
    state.tasks_discarded += len(groups) - trained
    waiting = 0
    if stream is not None:
        parts.bench.runner.call(stream.advance)
        waiting = len(parts.bench.runner.call(stream.outstanding))
    return {
        "tasks_drawn": float(parts.sampler.drawn),
        "tasks_trained": float(state.tasks_trained),
        "tasks_discarded": float(state.tasks_discarded),
        "tasks_waiting": float(waiting),
    }


def update_rules(parts: RlParts) -> tuple[UpdateRules, bool]:
    """(the numbers of this step's updates, whether engine and trainer both compute in float32)."""
    settings, bench = parts.settings, parts.bench
    exact = bench.engine.in_process and bench.engine.dtype == bench.policy.dtype == torch.float32
    correction: Correction
    asked, stale = settings.off_policy.correction, settings.off_policy.max_staleness > 0
    if asked == "auto":
        correction = "token_cap" if stale or not exact else "none"
    else:
        correction = "none" if asked == "behaviour" else asked
    rules = UpdateRules(
        row=settings.row(),
        temperature=bench.recipe.rollout.temperature,
        token_budget=settings.token_budget,
        correction=correction,
        clip_against="behaviour" if asked == "behaviour" else "proximal",
        constant=float(bench.recipe.rollout.max_tokens * bench.limits.max_turns),
        entropy_coefficient=entropy_bonus(settings, parts.state),
        loss=parts.own_loss,
    )
    return rules, exact


def _finished(settings: RlSection, state: RlState) -> bool:
    if settings.max_minutes is not None and state.seconds >= settings.max_minutes * 60:
        return True
    recent = state.history[-5:]
    wanted = settings.stop_at_success
    return wanted is not None and len(recent) == 5 and sum(recent) / 5 >= wanted
