"""The engine of a recipe, on the weights of its policy."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from stepladder.data.batching import whole_sample
from stepladder.engines.engine import PolicyEngine
from stepladder.engines.local.engine import LocalEngine
from stepladder.errors import ConfigError
from stepladder.policies.export import export_model
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.config import Recipe
from stepladder.recipe.engine import EngineSection


def make_engine(recipe: CommonRecipe, policy: Policy) -> PolicyEngine:
    """The engine of the recipe, on the policy's present weights.

    Raises ConfigError, and EngineError where a vLLM server does not start or does not serve the policy.
    """
    if recipe.engine.kind == "vllm":
        return _vllm(recipe.engine, recipe.rollout.max_context, policy)
    return LocalEngine(
        policy.model,
        max_context=recipe.rollout.max_context,
        exact=recipe.run.exact,
        pad_token_id=policy.tokenizer.pad_token_id or 0,
        private=trains_while_playing(recipe),
    )


def trains_while_playing(recipe: CommonRecipe) -> bool:
    """Do the engine and an update compute at the same time?"""
    return isinstance(recipe, Recipe) and recipe.rl is not None and recipe.rl.off_policy.max_staleness > 0


def check_engine(section: EngineSection) -> None:
    """Raise ConfigError for what is missing, before a model is loaded."""
    if section.kind == "local":
        return
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("engine.kind = 'vllm' needs httpx: pip install 'stepladder[openai]'")
    if section.python is not None and shutil.which(Path(section.python).expanduser()) is None:
        raise ConfigError(
            f"engine.python = {section.python!r} is no program; give the interpreter of an environment with "
            "vllm, such as /opt/vllm/bin/python (bench/make_vllm_env.sh makes one)"
        )
    if section.folder is not None and not Path(section.folder).is_dir():
        raise ConfigError(f"engine.folder = {section.folder!r} is no folder; make it, or leave it out")


def policy_logprobs(policy: Policy, token_ids: Sequence[int], temperature: float) -> list[float]:
    """log p of `token_ids[1:]` by the policy, each given what precedes it."""
    sample = whole_sample(tuple(token_ids), "probe")
    with torch.no_grad():
        scored: list[float] = policy.logprobs([sample], temperature=temperature).logprobs[0, 1:].tolist()
    return scored


def _vllm(section: EngineSection, max_context: int, policy: Policy) -> PolicyEngine:
    from stepladder.engines.vllm.control import connect, start
    from stepladder.engines.vllm.engine import VllmEngine

    dtype = policy.dtype if section.dtype == "auto" else getattr(torch, section.dtype)

    def export(folder: Path) -> None:
        # Untied: a CPU build of vLLM cannot load new weights into shared embeddings (it packs a copy).
        export_model(policy.model, policy.tokenizer, folder, merged=True, untied=True)

    if section.url is not None:
        control = connect(section.url, dtype=dtype, max_context=max_context, deadline=section.deadline)
        control.reload_from(export, Path(section.folder) if section.folder else None)
    else:
        assert section.python is not None
        control = start(
            section.python,
            export,
            dtype=dtype,
            max_context=max_context,
            options=section.options,
            start_seconds=section.start_seconds,
            deadline=section.deadline,
        )
    try:
        return VllmEngine(
            control,
            export=export,
            scores=lambda ids, temperature: policy_logprobs(policy, ids, temperature),
            vocabulary=policy.lm.get_input_embeddings().weight.shape[0],
            max_context=max_context,
            dtype=dtype,
            deadline=section.deadline,
            folder=Path(section.folder) if section.folder else None,
        )
    except BaseException:
        control.kill()
        raise
