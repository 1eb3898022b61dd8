"""The section of reinforcement learning."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import Field, model_validator

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.errors import nearest
from stepladder.sections.section import Section


class RlSection(Section):
    """Reinforcement learning: `tasks_per_step` groups of `group_size` episodes, then an update."""

    algorithm: str = Field("grpo", description="a row of stepladder/algorithms.py")
    steps: int = Field(50, ge=1, description="batches of rollouts, each followed by its updates")
    tasks_per_step: int = Field(8, ge=1, description="groups per step, one task each")
    group_size: int = Field(8, ge=2, description="episodes of the same task")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, constant after the warm-up")
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    updates_per_batch: int = Field(1, ge=1, description="optimiser steps on one batch of rollouts")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    aggregation: (
        Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"] | None
    ) = Field(None, description="instead of the algorithm's own")
    scale: Literal["group_std", "batch_std", "none"] | None = Field(
        None, description="what advantages are divided by, instead of the algorithm's own"
    )
    clip_low: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    clip_high: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    kl_coefficient: float | None = Field(
        None,
        ge=0,
        description="of the KL term that holds the policy near the one RL began with, instead of the "
        "algorithm's own; 0 saves the reference model",
    )
    correction: Literal["auto", "none", "token_cap", "token_mask"] = Field(
        "auto", description="for an engine that samples from slightly other numbers (bf16): token_cap"
    )
    sampling: Literal["uniform", "adaptive"] = Field(
        "uniform", description="adaptive: domains by p(1-p) of their moving success, with a floor"
    )
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only the end")
    stop_at_success: float | None = Field(
        None, gt=0, le=1, description="end when the mean training success of the last 5 steps reaches it"
    )
    max_minutes: float | None = Field(
        None, gt=0, description="no new step begins after this time in steps (evaluations not counted)"
    )

    @model_validator(mode="after")
    def _known(self) -> RlSection:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no algorithm {self.algorithm!r}.{nearest(self.algorithm, ALGORITHMS)} "
                f"Known: {', '.join(ALGORITHMS)}"
            )
        self.row()
        return self

    def row(self) -> Algorithm:
        """The algorithm's row with this recipe's overrides."""
        row = ALGORITHMS[self.algorithm]
        changes: dict[str, Any] = {}
        for key in ("aggregation", "scale", "clip_low", "clip_high"):
            if getattr(self, key) is not None:
                changes[key] = getattr(self, key)
        if self.kl_coefficient is not None:
            changes["kl_coefficient"] = self.kl_coefficient
            if self.kl_coefficient == 0:
                changes["kl_in"] = "none"
            elif row.kl_in == "none":
                changes["kl_in"] = "loss"
        if row.surrogate == "reinforce" and (self.clip_low is not None or self.clip_high is not None):
            raise ValueError(
                f"{row.name!r} has no ratio to clip, so clip_low={self.clip_low} and "
                f"clip_high={self.clip_high} mean nothing; leave them out, or use algorithm = 'grpo'"
            )
        if row.advantage != "group" and self.scale is not None:
            raise ValueError(
                f"{row.name!r} takes rewards against a fixed baseline, so scale={self.scale!r} means "
                "nothing; leave it out, or use algorithm = 'grpo'"
            )
        row = dataclasses.replace(row, **changes)
        if row.needs_critic or row.advantage not in ("group", "constant") or row.kl_in == "reward":
            raise ValueError(
                f"{row.name!r} needs a critic, batch whitening or a KL term in the reward, which this loop "
                "does not have yet; try algorithm = 'grpo', 'dr_grpo', 'dapo', 'gspo' or 'cispo'"
            )
        return row
