"""What a plan needs to know of a rung besides the common sections of the recipe; each rung says it itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Needs:
    """One rung of a recipe, as far as its memory and its time go.

    A step trains `rows` times `answers` sequences. Those of a row share a prompt; `shares_prompt`: it is
    computed once for them all. `steps` is None where the data say how many there are.
    """

    rows: int
    token_budget: int
    answers: int = 1
    steps: int | None = None
    longest: int | None = None
    """Tokens of one sequence at most; None: rollout.max_context."""
    shares_prompt: bool = False
    keeps_best: bool = False
    """Whether the weights of the best epoch are kept beside the present ones."""
    scores: bool = False
    """Whether a copy of the policy with a head is trained instead of the policy."""
    reference: bool = False
    critic: Literal["none", "shared", "separate"] = "none"
    teacher: str | None = None
    teacher_dtype: str = "auto"
    plays: bool = False
    """Whether the sequences of a step are sampled in the environment, `answers` episodes to a task."""
    plays_ahead: bool = False
    """Whether episodes are played while the policy is trained, from weights of the engine's own."""
    updates: int = 1
    """Optimiser steps on the sequences of one step."""


def both_sides_limit(prompt: int | None, completion: int | None) -> int | None:
    """Return the tokens of a prompt with its completion at most, where both have a limit."""
    return None if prompt is None or completion is None else prompt + completion
