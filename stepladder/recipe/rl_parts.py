"""Parts of the section of reinforcement learning that have keys of their own."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from stepladder.recipe.section import Section


class CriticSection(Section):
    """The value function of `ppo`: a scalar head that says what a state is worth."""

    trunk: Literal["separate", "shared"] = Field(
        "separate",
        description="separate: on a copy of the model, with an optimiser of its own; shared: on the policy's "
        "own body, which saves a second model and lets the value loss train it too",
    )
    learning_rate: float = Field(
        1e-5, gt=0, allow_inf_nan=False, description="of a critic with a trunk of its own"
    )
    coefficient: float = Field(0.1, gt=0, description="of the value loss, where the trunk is shared")
    updates_per_batch: int | None = Field(
        None, ge=1, description="optimiser steps of a separate critic on one batch; unset: as the policy's"
    )
    value_clip: float = Field(
        0.2,
        ge=0,
        description="how far a value may move from what it was on this batch, in units of reward; 0: no clip",
    )
    warmup_steps: int = Field(
        0, ge=0, description="first steps of the run in which a separate critic learns and the policy waits"
    )
    lam: float = Field(0.95, ge=0, le=1, description="λ of generalised advantage estimation, per token")
    turn_lam: float = Field(1.0, ge=0, le=1, description='λ over turns, with rl.credit = "bilevel"')
    bootstrap: Literal["never", "limits", "always"] = Field(
        "limits",
        description="which cut episodes end in the critic's value instead of 0. limits: those cut by the "
        "environment or by max_turns; always: also a message longer than max_tokens and a full context",
    )


class BonusSection(Section):
    """A reward for form: for calling tools, or for a format. Added to the score, shown as its own part."""

    kind: Literal["tool", "format"] = Field(
        description="tool: calls that could be read; format: an episode that ended by itself, without a "
        "malformed call, whose last message matches `pattern`"
    )
    weight: float = Field(
        0.1, allow_inf_nan=False, description="of each call, or of each episode; may be negative"
    )
    per: Literal["episode", "call"] = Field(
        "episode", description="a tool bonus once an episode, or for each call (then set a cap)"
    )
    cap: float | None = Field(
        None, gt=0, description="the most that one episode can earn of it; unset: without end"
    )
    only_solved: bool = Field(False, description="paid in episodes that succeeded, and in no other")
    pattern: str = Field(
        "",
        description="regular expression: what the last message must hold (format; unset: any will do), or "
        "what counts as a call in a world whose calls are plain text (tool)",
    )
    anneal_steps: int | None = Field(
        None, ge=1, description="steps over which the weight falls to 0, in a straight line"
    )
    until_tool_rate: float | None = Field(
        None, gt=0, le=1, description="the weight falls to 0 as the share of episodes with a call reaches it"
    )

    @model_validator(mode="after")
    def _consistent(self) -> BonusSection:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern={self.pattern!r} is no regular expression ({error}); for example '^<think>'"
            ) from error
        if self.kind == "format" and (self.per == "call" or self.cap is not None):
            raise ValueError(
                f"a format bonus is paid once an episode, so per={self.per!r} and cap={self.cap} say "
                "nothing; leave them out"
            )
        if self.cap is not None and self.cap < abs(self.weight):
            raise ValueError(
                f"cap={self.cap:g} is less than one bonus of weight={self.weight:g}; for example cap = "
                f"{abs(self.weight) * 2:g}"
            )
        return self
