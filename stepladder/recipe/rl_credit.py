"""Tables of [rl] about what a token earns: credit, the critic, bonuses, and long turns."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from stepladder.recipe.section import Names, Refusals, Section


class CreditSection(Section):
    """How rewards become the advantages of tokens."""

    kind: Literal["outcome", "turns", "process", "gigpo", "bilevel"] = Field(
        "outcome",
        description="what a token is judged by. outcome: the episode's score; turns: what its turn and the "
        "later ones earned; process: normalised rewards of turns, summed to the end; gigpo: turns that saw "
        "the same against each other; bilevel: with a critic, over turns and then over tokens",
    )
    advantage: Annotated[str | None, Names("code")] = Field(
        None, description="your own, by import path: fn(rewards, group_index, trajectories); [rl](rl.md)"
    )
    baseline: float | None = Field(
        None, allow_inf_nan=False, description="a fixed number that reinforce subtracts"
    )
    scale: Literal["group_std", "batch_std", "none"] | None = Field(
        None, description="what advantages are divided by, instead of the algorithm's own"
    )
    normalise: Literal["none", "domain", "task", "environment"] = Field(
        "none",
        description="keeps one kind of task from dominating. domain: scores to deviation 1 within each "
        "domain; task: token advantages to mean 0 and deviation 1 within each domain (AgentRL); "
        "environment: group mean, deviation of the environment (ERPO)",
    )
    whiten: bool | None = Field(
        None, description="token advantages to mean 0 and deviation 1 over the batch, last of all"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token, of critics and batch returns")
    turn_gamma: float | None = Field(
        None, ge=0, le=1, description="discount per turn; unset: 0.95 with gigpo, else 1"
    )
    anchor_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="ω of gigpo: the weight of the step's part"
    )


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
    turn_lam: float = Field(1.0, ge=0, le=1, description='λ over turns, with rl.credit.kind = "bilevel"')
    bootstrap: Literal["never", "limits", "always"] = Field(
        "limits",
        description="which cut episodes end in the critic's value instead of 0. limits: those cut by the "
        "environment or by max_turns; always: also a message longer than max_tokens and a full context",
    )

    refusals: ClassVar[Refusals] = {
        "warmup_steps={s.warmup_steps} and updates_per_batch={s.updates_per_batch} are of a critic with "
        "a trunk of its own; leave them out, or set trunk = 'separate'": lambda s: (
            s.trunk == "shared" and (s.warmup_steps or s.updates_per_batch)
        ),
    }


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

    refusals: ClassVar[Refusals] = {
        "a format bonus is paid once per episode, so per={s.per!r} and cap={s.cap} say nothing; leave "
        "them out": lambda s: s.kind == "format" and (s.per == "call" or s.cap is not None),
        "cap={s.cap:g} is less than one bonus of weight={s.weight:g}; leave cap out, or raise it to "
        "several times the weight": lambda s: s.cap is not None and s.cap < abs(s.weight),
    }

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pattern={pattern!r} is not a regular expression ({error}); for example '^<think>'"
            ) from error
        return pattern


class OverlongSection(Section):
    """The soft punishment of turns that come near rollout.max_tokens (DAPO)."""

    penalty: float | None = Field(
        None, ge=0, description="weight of the punishment, instead of the algorithm's own; dapo: 1"
    )
    share: float = Field(
        0.2, gt=0, le=1, description="share of max_tokens over which it grows to its full weight"
    )
