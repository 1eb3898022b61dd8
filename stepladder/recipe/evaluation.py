"""The section of held-out evaluation."""

from __future__ import annotations

from pydantic import Field

from stepladder.recipe.section import Section


class EvaluationSection(Section):
    """Held-out evaluation: before the first rung, after each rung."""

    split: str = Field("test", description="where held-out tasks come from")
    tasks: int = Field(200, ge=1, description="how many, the first of the split")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    raw: int = Field(100, ge=0, description="tasks for the untrained model; 0 skips it")
    few_shot: int = Field(0, ge=0, description="worked examples in the prompt of a second raw evaluation")
    examples: int = Field(4, ge=0, description="trajectories kept for the report")
