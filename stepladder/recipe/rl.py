"""The section of reinforcement learning."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.errors import nearest
from stepladder.recipe.rl_credit import BonusSection, CreditSection, CriticSection, OverlongSection
from stepladder.recipe.rl_loss import ClipSection, EntropySection, KlSection, OffPolicySection, ReplaySection
from stepladder.recipe.rl_refusals import REFUSALS
from stepladder.recipe.rl_tasks import HorizonSection, TasksSection
from stepladder.recipe.section import Names, OptimizerKeys, RungSection, refuse

COLUMNS = {
    "sequence": "sequence",
    "aggregation": "aggregation",
    "scale": "credit.scale",
    "whiten": "credit.whiten",
    "clip_low": "clip.low",
    "clip_high": "clip.high",
    "clip_absolute": "clip.absolute",
    "dual_clip": "clip.dual",
    "dynamic_sampling": "tasks.dynamic_sampling",
    "overlong_penalty": "overlong.penalty",
}
"""Columns of the algorithm's row that a key of [rl] replaces where it is set, and that key."""


class RlSection(OptimizerKeys, RungSection):
    """Reinforcement learning: `tasks_per_step` groups of `group_size` episodes, then an update."""

    label: ClassVar[str] = "after RL"
    wish: ClassVar[str] = "[rl] plays episodes"
    writes: ClassVar[tuple[str, ...]] = ("reference.safetensors",)

    algorithm: str = Field("grpo", description="a row of stepladder/algorithms.py")
    steps: int = Field(50, ge=1, description="batches of rollouts, each followed by its updates")
    tasks_per_step: int = Field(8, ge=1, description="groups per step, one task each")
    group_size: int = Field(8, ge=1, description="episodes of the same task")
    updates_per_batch: int = Field(1, ge=1, description="optimiser steps on one batch of rollouts")
    aggregation: (
        Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"] | None
    ) = Field(None, description="instead of the algorithm's own")
    sequence: Literal["trajectory", "turn"] | None = Field(
        None,
        description="what one sequence is for ratios, lengths and denominators, instead of the "
        "algorithm's own",
    )
    loss: Annotated[str | None, Names("code")] = Field(
        None,
        description="your own, by import path: fn(logprobs, proximal, advantages, mask); [rl](rl.md)",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="no new step begins after this time in steps (evaluations are not counted)"
    )
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only the end")
    stop_at_success: float | None = Field(
        None, gt=0, le=1, description="end when the mean training success of the last 5 steps reaches it"
    )
    on_alarm: Literal["warn", "stop", "remedy"] = Field(
        "warn",
        description="when the run looks like collapsing: warn only; stop with a checkpoint; or apply the "
        "alarm's advice, once for each alarm",
    )
    tasks: TasksSection = TasksSection()
    horizon: HorizonSection = HorizonSection()
    credit: CreditSection = CreditSection()
    critic: CriticSection | None = None  # ppo has one in any case
    overlong: OverlongSection = OverlongSection()
    clip: ClipSection = ClipSection()
    kl: KlSection = KlSection()
    entropy: EntropySection = EntropySection()
    off_policy: OffPolicySection = OffPolicySection()
    replay: ReplaySection = ReplaySection()
    bonuses: tuple[BonusSection, ...] = ()  # [[rl.bonuses]]

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> RlSection:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no algorithm {self.algorithm!r}.{nearest(self.algorithm, ALGORITHMS)} "
                f"Known: {', '.join(ALGORITHMS)}"
            )
        refuse(REFUSALS, s=self, row=self.row())
        return self

    def row(self) -> Algorithm:
        """Return the algorithm's row with this recipe's overrides."""
        given = {column: attrgetter(key)(self) for column, key in COLUMNS.items()}
        changes: dict[str, Any] = {column: value for column, value in given.items() if value is not None}
        return dataclasses.replace(self.kl.applied_to(ALGORITHMS[self.algorithm]), **changes)
