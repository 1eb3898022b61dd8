"""A recipe as a plan: what each of its rungs trains, holds in memory, and takes in time.

Lengths of data are not known before it is read, so numbers of tokens are the most that the recipe allows:
memory and time are upper ends, but for the slack of allocators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepladder.engines.local.engine import MAX_ROWS
from stepladder.engines.local.fused import FUSABLE
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
    *,
    device: str,
    dtype: str,
    machine: Machine | None = None,
    shape_by_name: Callable[..., Shape] = model_shape,
) -> Plan:
    """The plan of `recipe` on a device and in a type that stand fixed; without a `machine` no times.

    Raises ModelNotFound or ConfigError where a model's sizes cannot be read.
    """
    shape = shape_by_name(recipe.model.name, recipe.model.options)
    lora = recipe.model.lora
    adapter = lora_parameters(shape, lora.rank, lora.targets) if lora is not None else 0
    plan = Plan(recipe.model.name, shape, device, dtype, adapter, ())
    rungs = [
        _rung(recipe, name, plan, machine, shape_by_name)
        for name in rung_sections()
        if getattr(recipe, name) is not None
    ]
    return replace(plan, rungs=tuple(rungs))


def trainable_of(recipe: Recipe, shape: Shape, adapter: int) -> int:
    """Parameters that training updates in the policy."""
    if adapter:
        return adapter
    frozen = 0 if recipe.model.train_embeddings else shape.embedding + shape.output
    return shape.parameters - frozen


def _rung(
    recipe: Recipe, name: str, plan: Plan, machine: Machine | None, shape_by_name: Callable[..., Shape]
) -> RungPlan:
    section: Any = getattr(recipe, name)
    shape, width = plan.shape, plan.width
    notes: list[str] = []
    parts = [Part("Python and libraries", LIBRARIES, "measured after import: torch, transformers")]
    parts.append(weights_part("policy", shape, width, plan.lora))
    trainable = trainable_of(recipe, shape, plan.lora)
    keeps = name not in ("rl", "distillation") and bool(section.validation)
    model = Trained(name="policy", shape=shape, width=width, trainable=trainable, copies_best=keeps)
    if name in SCORING:
        parts.append(weights_part("copy with a head", shape, width, plan.lora))
        trainable = plan.lora or trainable - (shape.output if recipe.model.train_embeddings else 0)
        trainable += shape.hidden
        model = replace(model, name="scores", trainable=trainable)
    parts += trained_parts(model)
    critic = name == "rl" and section.row().needs_critic
    own_trunk = critic and (section.critic is None or section.critic.trunk == "separate")
    if name == "rl" and section.row().kl_in != "none":
        parts.append(weights_part("reference", shape, width, plan.lora))
    if own_trunk:
        parts.append(weights_part("critic", shape, width, plan.lora))
        size = plan.lora or trainable - (shape.output if recipe.model.train_embeddings else 0)
        parts += trained_parts(replace(model, name="critic", trainable=size + shape.hidden))
    if name == "distillation":
        teacher = shape_by_name(section.teacher)
        parts.append(weights_part("teacher", teacher, 4 if section.teacher_dtype == "float32" else width))
    parts += _other_models(recipe, plan, notes, shape_by_name)
    micro = _micro(recipe, name, section, shape, trainable, graphs=2 if critic and not own_trunk else 1)
    if plan.device == "cpu":
        # a tile of queries holds the masks of its own few columns, once for all layers
        micro = replace(micro, block=0)
    parts += update_parts(model, micro)
    if plan.device == "cpu":
        parts.append(slack_part(parts, adapter=plan.lora > 0))
    if recipe.environment is not None and recipe.engine.kind == "local":
        parts += _engine(recipe, plan)
    elif recipe.engine.kind == "vllm":
        notes.append("the vLLM server has memory of its own, which is not counted")
    tokens, steps = _amount(recipe, name, section)
    if not shape.known:
        notes.append(f"{shape.family!r} is counted as a Llama-like model: its numbers are less certain")
    seconds = None if machine is None else _seconds(recipe, name, section, plan, machine, tokens, trainable)
    total = shape.parameters + plan.lora + (shape.hidden if name in SCORING else 0)
    return RungPlan(name, trainable, total - trainable, tuple(parts), tokens, steps, seconds, tuple(notes))


def _micro(recipe: Recipe, name: str, section: Any, shape: Shape, trainable: int, *, graphs: int) -> Micro:
    tokens = section.token_budget
    siblings = {"rl": getattr(section, "group_size", 1), "preference": 2, "reward_model": 2}.get(name, 1)
    longest = _longest(recipe, section)
    shared = prompt_tokens(recipe.rollout) if name == "rl" else 0
    length = min(tokens, shared + siblings * (longest - shared))
    head: Any = "trained" if trainable > shape.matrices * 1.05 else "frozen"
    return Micro(
        tokens=tokens,
        graphs=graphs,
        head="none" if name in SCORING else head,
        recompute=recipe.model.recompute_layers,
        block=length if siblings > 1 else 0,
    )


def _longest(recipe: Recipe, section: Any) -> int:
    """Tokens of one sample at most, as far as the recipe says."""
    limit = getattr(section, "max_tokens", None)
    prompt, answer = (getattr(section, f"max_{part}_tokens", None) for part in ("prompt", "completion"))
    if limit is None and prompt is not None and answer is not None:
        limit = prompt + answer
    return int(limit or recipe.rollout.max_context)


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


def _engine(recipe: Recipe, plan: Plan) -> list[Part]:
    most = max(recipe.evaluation.tasks, recipe.evaluation.raw)
    if recipe.rl is not None:
        most = max(most, recipe.rl.tasks_per_step * recipe.rl.group_size)
    return engine_parts(
        plan.shape,
        plan.width,
        rows=min(MAX_ROWS, recipe.rollout.concurrency, most),
        length=recipe.rollout.max_context,
        packed=plan.device == "cpu" and plan.shape.family in FUSABLE,
        copy=recipe.rl is not None and recipe.rl.max_staleness > 0,
    )


def _amount(recipe: Recipe, name: str, section: Any) -> tuple[int, int | None]:
    """(tokens of a step at most, steps at most or None)."""
    longest = _longest(recipe, section)
    if name in ("rl", "distillation") and not (name == "distillation" and section.on_policy == 0):
        siblings = section.group_size if name == "rl" else section.samples
        r = recipe.rollout
        prompt = prompt_tokens(r)  # computed once a group
        return section.tasks_per_step * (prompt + siblings * (r.max_context - prompt)), section.steps
    if name == "distillation":
        return section.batch_size * longest, section.steps
    answers = 2 if name in ("preference", "reward_model") else 1
    made = getattr(section, "demonstrations", 0)  # those held out are made in addition
    if pairs := getattr(section, "pairs", 0):
        made = max(1, pairs - section.validation)
    steps = section.epochs * -(-made // section.batch_size) if made else None
    return section.batch_size * answers * longest, steps


def prompt_tokens(rollout: RolloutSection) -> int:
    """What the context holds besides the longest turns: the prompt, as far as the recipe says."""
    return max(0, rollout.max_context - rollout.max_turns * rollout.max_tokens)


def _seconds(
    recipe: Recipe, name: str, section: Any, plan: Plan, machine: Machine, tokens: int, trainable: int
) -> float:
    shape, context = plan.shape, _longest(recipe, section) / 2
    once = update_seconds(
        shape,
        plan.width,
        machine,
        tokens=tokens,
        context=context,
        trainable=trainable,
        head=name not in SCORING,
    )
    if name not in ("rl", "distillation"):
        return once
    total = once * getattr(section, "updates_per_batch", 1)
    if name == "distillation" or section.row().kl_in != "none":
        total += forward_seconds(shape, machine, tokens=tokens, context=context)
    if name == "rl" and section.row().needs_critic:
        total += once * (section.critic is None or section.critic.trunk == "separate")
    r = recipe.rollout
    siblings = section.group_size if name == "rl" else section.samples
    return total + play_seconds(
        shape,
        plan.width,
        machine,
        episodes=section.tasks_per_step * siblings,
        rows=min(MAX_ROWS, r.concurrency),
        sampled=min(r.max_turns * r.max_tokens, r.max_context),
        prompts=section.tasks_per_step * prompt_tokens(r),
        context=r.max_context,
    )
