"""A recipe as a plan: what each of its rungs trains, holds in memory, and takes in time.

Lengths of data are not known before it is read, so numbers of tokens are the most that the recipe allows:
memory and time are upper ends, but for the slack of allocators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepladder.engines.local.facts import FUSABLE, MAX_ROWS
from stepladder.planning.machine import Machine
from stepladder.planning.memory import (
    LIBRARIES,
    Micro,
    Part,
    Trained,
    engine_parts,
    peak,
    slack_part,
    trained_parts,
    update_parts,
    weights_part,
)
from stepladder.planning.needs import Needs
from stepladder.planning.shape import Shape, lora_parameters
from stepladder.planning.sources import model_shape
from stepladder.planning.speed import forward_seconds, play_seconds, update_seconds
from stepladder.recipe.config import Recipe, rung_sections
from stepladder.recipe.run import RolloutSection

SCORING = tuple(name for name, section in rung_sections().items() if not section.trains_policy)


@dataclass(frozen=True, slots=True)
class RungPlan:
    """One rung. `tokens`: of a step, at most. `seconds`: of a step; `steps` None: the data says how many."""

    name: str
    trainable: int
    frozen: int
    parts: tuple[Part, ...]
    tokens: int
    steps: int | None
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment."""
        return peak(self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """All rungs of a recipe on one model."""

    model: str
    shape: Shape
    device: str
    dtype: str
    lora: int  # parameters of the adapter; 0 without one
    rungs: tuple[RungPlan, ...]

    @property
    def width(self) -> int:
        """Bytes of a number in the compute type."""
        return 4 if self.dtype == "float32" else 2


def plan_recipe(
    recipe: Recipe,
    needs: Mapping[str, Needs],
    *,
    device: str,
    dtype: str,
    machine: Machine | None = None,
    shape_by_name: Callable[..., Shape] = model_shape,
) -> Plan:
    """The plan of `recipe`, whose rungs have these `needs`, on a device and in a type that stand fixed.

    Without a `machine` there are no times. Raises ModelNotFound or ConfigError where a model's sizes cannot
    be read.
    """
    shape = shape_by_name(recipe.model.name, recipe.model.options)
    lora = recipe.model.lora
    adapter = lora_parameters(shape, lora.rank, lora.targets) if lora is not None else 0
    plan = Plan(recipe.model.name, shape, device, dtype, adapter, ())
    engine = _engine(recipe, plan, needs.values())
    rungs = [_rung(recipe, name, need, plan, machine, shape_by_name, engine) for name, need in needs.items()]
    return replace(plan, rungs=tuple(rungs))


def trainable_of(recipe: Recipe, shape: Shape, adapter: int) -> int:
    """Parameters that training updates in the policy."""
    if adapter:
        return adapter
    frozen = 0 if recipe.model.train_embeddings else shape.embedding + shape.output
    return shape.parameters - frozen


def _rung(
    recipe: Recipe,
    name: str,
    need: Needs,
    plan: Plan,
    machine: Machine | None,
    shape_by_name: Callable[..., Shape],
    engine: list[Part],
) -> RungPlan:
    shape, width = plan.shape, plan.width
    notes: list[str] = []
    parts = [Part("Python and libraries", LIBRARIES, "measured after import: torch, transformers")]
    parts.append(weights_part("policy", shape, width, plan.lora))
    trainable = trainable_of(recipe, shape, plan.lora)
    model = Trained(name="policy", shape=shape, width=width, trainable=trainable, copies_best=need.keeps_best)
    headless = plan.lora or trainable - (shape.output if recipe.model.train_embeddings else 0)
    if need.scores:
        parts.append(weights_part("copy with a head", shape, width, plan.lora))
        trainable = headless + shape.hidden
        model = replace(model, name="scores", trainable=trainable)
    parts += trained_parts(model)
    if need.reference:
        parts.append(weights_part("reference", shape, width, plan.lora))
    if need.critic == "separate":
        parts.append(weights_part("critic", shape, width, plan.lora))
        parts += trained_parts(replace(model, name="critic", trainable=headless + shape.hidden))
    if need.teacher is not None:
        teacher = shape_by_name(need.teacher)
        parts.append(weights_part("teacher", teacher, 4 if need.teacher_dtype == "float32" else width))
    parts += _other_models(recipe, plan, notes, shape_by_name)
    parts += update_parts(model, _micro(recipe, need, plan, trainable))
    if plan.device == "cpu":
        parts.append(slack_part(parts, adapter=plan.lora > 0))
    parts += engine
    if recipe.engine.kind == "vllm":
        notes.append("the vLLM server has memory of its own, which is not counted")
    if not shape.known:
        notes.append(f"{shape.family!r} is counted as a Llama-like model: its numbers are less certain")
    tokens = _tokens(recipe, need)
    seconds = None if machine is None else _seconds(recipe, need, plan, machine, tokens, trainable)
    frozen = shape.parameters + plan.lora + (shape.hidden if need.scores else 0) - trainable
    return RungPlan(name, trainable, frozen, tuple(parts), tokens, need.steps, seconds, tuple(notes))


def _micro(recipe: Recipe, need: Needs, plan: Plan, trainable: int) -> Micro:
    siblings = 1 if need.plays and not need.shares_prompt else need.answers
    shared = prompt_tokens(recipe.rollout) if need.shares_prompt else 0
    length = min(need.token_budget, shared + siblings * (_longest(recipe, need) - shared))
    head: Any = "trained" if trainable > plan.shape.matrices * 1.05 else "frozen"
    # On a CPU a tile of queries holds the masks of its own few columns, once for all layers.
    block = length if siblings > 1 and plan.device != "cpu" else 0
    return Micro(
        tokens=need.token_budget,
        graphs=2 if need.critic == "shared" else 1,
        head="none" if need.scores else head,
        recompute=recipe.model.recompute_layers,
        block=block,
    )


def _longest(recipe: Recipe, need: Needs) -> int:
    """Tokens of one sequence at most, as far as the recipe says."""
    return need.longest or recipe.rollout.max_context


def _other_models(
    recipe: Recipe, plan: Plan, notes: list[str], shape_by_name: Callable[..., Shape]
) -> list[Part]:
    """Reward models that the environment's scores take, in the policy's type."""
    parts = []
    for reward in recipe.environment.rewards if recipe.environment is not None else ():
        kind, _, rest = reward.partition(":")
        if kind not in SCORING:
            continue
        for path in rest.partition("?")[0].split(","):
            folder = Path(path.strip())
            there = folder.is_dir()
            shape = shape_by_name(str(folder)) if there else plan.shape
            if not there:
                notes.append(f"{path} is no folder here; it is counted as large as the policy")
            parts.append(weights_part(f"{kind} {Path(path).name}", shape, plan.width))
    return parts


def _engine(recipe: Recipe, plan: Plan, needs: Collection[Needs]) -> list[Part]:
    if recipe.environment is None or recipe.engine.kind != "local":
        return []
    most = max(
        [recipe.evaluation.tasks, recipe.evaluation.raw, *(n.rows * n.answers for n in needs if n.plays)]
    )
    return engine_parts(
        plan.shape,
        plan.width,
        rows=min(MAX_ROWS, recipe.rollout.concurrency, most),
        length=recipe.rollout.max_context,
        packed=plan.device == "cpu" and plan.shape.family in FUSABLE,
        copy=any(n.plays_ahead for n in needs),
    )


def _tokens(recipe: Recipe, need: Needs) -> int:
    """Tokens of a step at most."""
    if not need.plays:
        return need.rows * need.answers * _longest(recipe, need)
    r = recipe.rollout
    prompt = prompt_tokens(r)  # computed once per group
    return need.rows * (prompt + need.answers * (r.max_context - prompt))


def prompt_tokens(rollout: RolloutSection) -> int:
    """What the context holds besides the longest turns: the prompt, as far as the recipe says."""
    return max(0, rollout.max_context - rollout.max_turns * rollout.max_tokens)


def _seconds(recipe: Recipe, need: Needs, plan: Plan, machine: Machine, tokens: int, trainable: int) -> float:
    shape, context = plan.shape, _longest(recipe, need) / 2
    once = update_seconds(
        shape,
        plan.width,
        machine,
        tokens=tokens,
        context=context,
        trainable=trainable,
        head=not need.scores,
    )
    total = once * need.updates
    if need.reference or need.teacher is not None:
        total += forward_seconds(shape, machine, tokens=tokens, context=context)
    if need.critic == "separate":
        total += once
    if not need.plays:
        return total
    r = recipe.rollout
    return total + play_seconds(
        shape,
        plan.width,
        machine,
        episodes=need.rows * need.answers,
        rows=min(MAX_ROWS, r.concurrency),
        sampled=min(r.max_turns * r.max_tokens, r.max_context),
        prompts=need.rows * prompt_tokens(r),
        context=r.max_context,
    )
