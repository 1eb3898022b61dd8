"""The sections that every recipe has, whether it trains or only plays."""

from __future__ import annotations

from pydantic import model_validator

from stepladder.recipe.engine import EngineSection
from stepladder.recipe.run import EnvironmentSection, ModelSection, RolloutSection, RunSection
from stepladder.recipe.section import Section


class CommonRecipe(Section):
    """Where a run goes, its model, its world, how it plays and with what engine."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection | None = None
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()

    @model_validator(mode="after")
    def check_engine(self) -> CommonRecipe:
        """Refuse an engine that cannot keep what the run promises."""
        self.engine.check_exact(self.run.exact)
        return self
