"""Reward models named in a recipe's `environment.rewards`, loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from urllib.parse import parse_qsl

import torch

from stepladder.errors import ConfigError, nearest
from stepladder.objectives.reward_model import StepAggregation, solution_score
from stepladder.policies.conversation_scorer import ConversationScorer
from stepladder.policies.pretrained import DType
from stepladder.recipe.config import scoring_kinds
from stepladder.rewards.model import ProcessRewardModel, RewardModel
from stepladder.rewards.reward import Reward, as_reward

KINDS = scoring_kinds()
OPTIONS = {"outcome": ("combine", "normalise"), "process": ("combine", "aggregation")}
SECONDS = 600.0  # one call scores a whole group, on a CPU perhaps


def names_model(text: str) -> bool:
    """Return whether `text` is such as "reward_model:PATH" rather than an import path."""
    return text.partition(":")[0] in KINDS


def named_reward(text: str, *, dtype: DType = "auto", device: str = "auto") -> Reward:
    """Return the reward that `text` names: a trained model, see `model_reward`, or a function to import."""
    return model_reward(text, dtype=dtype, device=device) if names_model(text) else as_reward(text)


def model_reward(text: str, *, dtype: DType = "auto", device: str = "auto") -> Reward:
    """Return the reward that "KIND:PATH[,PATH...][?option=value&...]" names.

    KIND is reward_model (combine, normalise) or process_reward_model (combine, aggregation). Several paths
    are an ensemble. Raises ConfigError for an unknown option or a model of the other kind, and what
    `load_scored` raises.
    """
    kind, _, rest = text.partition(":")
    paths, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for key in options:
        if key not in OPTIONS[KINDS[kind]]:
            known = OPTIONS[KINDS[kind]]
            raise ConfigError(
                f"{text}: unknown option {key!r}.{nearest(key, known)} Known: {', '.join(known)}"
            )
    folders = [path.strip() for path in paths.split(",") if path.strip()]
    if not folders:
        raise ConfigError(f"{text} names no folder; write {kind}:runs/NAME/{kind}")
    members = [ConversationScorer.load(folder, dtype=dtype, device=device) for folder in folders]
    for folder, member in zip(folders, members, strict=True):
        if member.kind != KINDS[kind]:
            other = next(name for name, of in KINDS.items() if of == member.kind)
            raise ConfigError(f"{folder} holds a {other}; write {other}:{folder}")
    combine: Any = options.get("combine", "mean")
    if KINDS[kind] == "process":
        aggregate = _aggregate(text, options.get("aggregation", "min"))
        made: Any = ProcessRewardModel(members, aggregate=aggregate, combine=combine)
    else:
        made = RewardModel(members, combine=combine, normalise=_flag(text, options.get("normalise", "true")))
    return Reward(kind, made, "group", SECONDS)


def _aggregate(text: str, name: str) -> Any:
    if name not in get_args(StepAggregation):
        known = get_args(StepAggregation)
        raise ConfigError(
            f"{text}: aggregation must be one of {', '.join(known)}; got {name!r}.{nearest(name, known)}"
        )
    chosen: Any = name

    def aggregate(logprobs: Sequence[float]) -> float:
        row = torch.tensor([list(logprobs)], dtype=torch.float64)
        return float(solution_score(row, torch.ones_like(row, dtype=torch.bool), aggregation=chosen))

    return aggregate


def _flag(text: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"{text}: normalise must be true or false; got {value!r}")
    return value == "true"
