"""What the sections of reward models have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import RungSection


class ScoringSection(RungSection):
    """Epochs over scored rows on a copy of the policy, which itself stays as it is."""

    trains_policy: ClassVar[bool] = False
    kind: ClassVar[Literal["outcome", "process"]]
    """What its model scores: a whole answer, or each step of it."""

    epochs: int = Field(3, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(16, ge=1, description="rows per optimiser step")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, constant after the warm-up")
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    validation: int = Field(
        32,
        ge=0,
        description="rows held out, whose prompts no training row has; 0: no early stop, and nothing is "
        "known of the accuracy",
    )
    patience: int = Field(1, ge=1, description="epochs without a better validation loss before the stop")
    min_improvement: float = Field(
        0.002,
        ge=0,
        description="by how much a validation loss must be lower to count for patience; the weights of the "
        "lowest are kept in any case",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longer prompts lose their beginning; unset: no limit"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="longer answers lose their end; unset: no limit"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    max_minutes: float | None = Field(None, gt=0, description="no new epoch begins after this time")

    def _refuse_too_few(self, count: int, what: str) -> None:
        """ValueError where `validation` takes all of `count` rows that are to be made (0: none are)."""
        if 0 < count <= self.validation:
            raise ValueError(
                f"{what} leaves nothing to train on, for validation={self.validation} holds back as many; "
                f"try validation = {count // 5}"
            )
