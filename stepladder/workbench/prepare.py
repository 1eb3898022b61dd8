"""Everything a run needs, built from a recipe: world first, so that a wrong setting costs no model load."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from stepladder.data.chat.renderer import Renderer
from stepladder.environments.checked import CheckedWorld
from stepladder.environments.environment import load_world
from stepladder.errors import ConfigError
from stepladder.play.loop_thread import LoopThread
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, Scorer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model, pick_device, pick_dtype
from stepladder.policies.tiny import tiny_model
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.config import Recipe
from stepladder.recipe.run import ModelSection
from stepladder.rewards.reward import score_group
from stepladder.types import Group
from stepladder.workbench.bench import Workbench
from stepladder.workbench.engine import check_engine, make_engine, trains_while_playing
from stepladder.workbench.model_rewards import named_reward
from stepladder.workbench.sources import Sources


class Checks(Protocol):
    """What a rung wants to be sure of before a run begins; see `rungs.base.Rung`."""

    def check(self, recipe: Recipe, world: CheckedWorld | None, sources: Sources) -> None:
        """Raise ConfigError or DataError, before a model is loaded."""

    def check_policy(self, recipe: Recipe, policy: Policy) -> None:
        """Raise ConfigError once the model is loaded."""


def prepare(recipe: CommonRecipe, rungs: Sequence[Checks] = ()) -> Workbench:
    """Make the world, let the `rungs` of the recipe check it and their files, then load the model.

    Raises ConfigError, ModelNotFound or DataError before any training.
    """
    set_threads(recipe.run.threads, halves=2 if trains_while_playing(recipe) else 1)
    check_engine(recipe.engine)
    if recipe.run.exact:
        be_deterministic(pick_device(recipe.model.device))
    sources = Sources()
    world = make_world(recipe) if recipe.environment is not None else None
    scorer = make_scorer(recipe)
    with contextlib.ExitStack() as undo:
        runner = undo.enter_context(LoopThread())
        if world is not None:
            runner.run(world.setup())
            undo.callback(lambda: runner.run(world.teardown()))
        if isinstance(recipe, Recipe):
            if world is not None:
                check_evaluation(recipe, world)
            for rung in rungs:
                rung.check(recipe, world, sources)
        policy = build_policy(recipe)
        if recipe.model.lora is not None:
            policy = _with_lora(policy, recipe)
        elif not recipe.model.train_embeddings:
            policy.freeze_embeddings()
        if recipe.model.recompute_layers:
            policy.recompute_layers()
        if isinstance(recipe, Recipe):
            for rung in rungs:
                rung.check_policy(recipe, policy)
        renderer = make_renderer(policy)
        undo.pop_all()
    return Workbench(
        recipe,
        world,
        policy,
        renderer,
        limits_of(recipe),
        scorer,
        runner,
        start_engine=lambda: make_engine(recipe, policy),
        make_agents=lambda engine, temperature, max_tokens: policy_agents(
            engine,
            renderer,
            temperature=temperature,
            max_tokens=max_tokens or recipe.rollout.max_tokens,
            max_context=recipe.rollout.max_context,
        ),
        sources=sources,
    )


def be_deterministic(device: str) -> None:
    """Let torch refuse algorithms whose result varies from run to run; called before CUDA starts."""
    if device.startswith("cuda"):
        # cuBLAS repeats its sums only with a fixed workspace; without it torch raises at the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds uninitialised reads; it costs a write of all memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_evaluation(recipe: Recipe, world: CheckedWorld) -> None:
    """Raise ConfigError for held-out tasks or worked examples that are not there."""
    assert recipe.environment is not None
    e = recipe.evaluation
    world.require(e.split, max(e.tasks, e.raw))
    if e.few_shot and not world.demonstrates:
        raise ConfigError(
            f"evaluation.few_shot={e.few_shot} needs worked examples, but the environment "
            f"{recipe.environment.name!r} has no demonstrations(count, seed) method; add one, or set "
            "evaluation.few_shot = 0"
        )


def make_world(recipe: CommonRecipe) -> CheckedWorld:
    """The world of the recipe. Raises ConfigError where there is none, or an option is unknown."""
    e = recipe.environment
    assert e is not None
    if "deadline" in e.options:
        asked = e.options["deadline"]
        raise ConfigError(
            f"environment.options.deadline={asked!r} is no option of an environment: the seconds that its "
            f"phases may take are a key of the rollout; write rollout.deadline = {asked}"
        )
    return load_world(e.name, deadline=recipe.rollout.deadline, **e.options)


def limits_of(recipe: CommonRecipe) -> Limits:
    r = recipe.rollout
    return Limits(
        max_turns=r.max_turns,
        max_observation_tokens=r.max_observation_tokens,
        concurrency=r.concurrency,
    )


def set_threads(threads: int, *, halves: int = 1) -> None:
    """Torch threads: as asked, or one a core this process may use, shared among `halves` that compute."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, available // halves))


def resolved(model: ModelSection) -> ModelSection:
    """The section with the device and type that "auto" stands for on this machine.

    Raises ConfigError where the device is not there.
    """
    device = pick_device(model.device)
    dtype = pick_dtype("float32" if (model.name, model.dtype) == ("tiny", "auto") else model.dtype, device)
    return model.model_copy(update={"device": device, "dtype": str(dtype).removeprefix("torch.")})


def build_policy(recipe: CommonRecipe) -> Policy:
    """The model of the recipe, from scratch or pretrained, with its tokenizer."""
    m = resolved(recipe.model)
    if m.name == "tiny":
        from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer

        tokenizer = tiny_tokenizer(*m.options.get("symbols", ()))
        sizes = {k: v for k, v in m.options.items() if k != "symbols"}
        model: Any = tiny_model(len(tokenizer), seed=recipe.run.seed, **sizes)
        model = model.to(device=m.device, dtype=getattr(torch, m.dtype))
    else:
        model, tokenizer = load_model(m.name, dtype=m.dtype, device=m.device)
    return Policy(model, tokenizer)


def make_renderer(policy: Policy) -> Renderer:
    """The tokenizer's chat template with the model's own end-of-turn ids."""
    generation = getattr(policy.lm, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    extra = [eos] if isinstance(eos, int) else list(eos or [])
    return Renderer(policy.tokenizer, extra_stop_ids=extra)


def _with_lora(policy: Policy, recipe: CommonRecipe) -> Policy:
    from peft import LoraConfig, get_peft_model

    lora = recipe.model.lora
    assert lora is not None
    torch.manual_seed(recipe.run.seed)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5.24 for it under its old name
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*deprecated", FutureWarning)
        adapted = get_peft_model(policy.lm, config)
    return Policy(adapted, policy.tokenizer)


def make_scorer(recipe: CommonRecipe) -> Scorer | None:
    """What adds the recipe's reward functions to the scores of a group; None where it names none."""
    if recipe.environment is None or not recipe.environment.rewards:
        return None
    model: Any = resolved(recipe.model)
    rewards = [
        named_reward(path, dtype=model.dtype, device=model.device) for path in recipe.environment.rewards
    ]

    async def score(group: Group) -> Group:
        return await score_group(group, rewards)

    return score
