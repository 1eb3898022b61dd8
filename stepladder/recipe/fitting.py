"""What every rung that imitates token sequences has in common."""

from __future__ import annotations

from pydantic import Field

from stepladder.recipe.section import EarlyStopKeys, OptimizerKeys, RungSection


class FittingSection(OptimizerKeys, EarlyStopKeys, RungSection):
    """Epochs, batches and the learning rate of supervised updates."""

    epochs: int = Field(10, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(8, ge=1, description="samples per optimiser step")
    learning_rate: float = Field(3e-5, gt=0, description="of AdamW, constant after the warm-up")
    min_improvement: float = Field(
        0.005,
        ge=0,
        description="by how many nats per token a validation loss must be lower to count for patience; the "
        "weights of the lowest are kept in any case",
    )
