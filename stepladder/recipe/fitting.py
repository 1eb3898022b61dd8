"""What every rung that imitates token sequences has in common."""

from __future__ import annotations

from pydantic import Field

from stepladder.recipe.section import RungSection


class FittingSection(RungSection):
    """Epochs, batches and the learning rate of supervised updates."""

    epochs: int = Field(10, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(8, ge=1, description="samples per optimiser step")
    learning_rate: float = Field(3e-5, gt=0, description="of AdamW, constant after the warm-up")
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    patience: int = Field(1, ge=1, description="epochs without a better validation loss before the stop")
    min_improvement: float = Field(
        0.005,
        ge=0,
        description="by how many nats a token a validation loss must be lower to count for patience; the "
        "weights of the lowest are kept in any case",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    max_minutes: float | None = Field(None, gt=0, description="no new epoch begins after this time")
