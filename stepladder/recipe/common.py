"""The sections that every recipe has, whether it trains or only plays."""

from __future__ import annotations

from typing import ClassVar

from stepladder.recipe.engine import EngineSection
from stepladder.recipe.run import EnvironmentSection, ModelSection, RolloutSection, RunSection
from stepladder.recipe.section import Refusals, Section


class CommonRecipe(Section):
    """Where a run goes, its model, its world, how it plays and with what engine."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection | None = None
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()

    refusals: ClassVar[Refusals] = {
        'engine.kind = "vllm" cannot repeat a run bit for bit (its floats depend on what shares a '
        "batch), and run.exact = true promises that; set run.exact = false": lambda s: (
            s.engine.kind == "vllm" and s.run.exact
        ),
    }
