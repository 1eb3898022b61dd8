"""The section of process reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import Names, Refusals, Section


class MonteCarloSection(Section):
    """Steps of the policy's own solutions, labelled by what comes of them (Math-Shepherd)."""

    tasks: int = Field(ge=1, description="training tasks that the policy solves")
    solutions_per_task: int = Field(4, ge=1, description="sampled of each task")
    completions: int = Field(8, ge=1, description="sampled after each step")
    labels: Literal["hard", "soft"] = Field(
        "hard", description="hard: 1 where any completion is right; soft: the share of right ones"
    )


class ProcessRewardModelSection(ScoringSection):
    """A process reward model on labelled steps, saved to `process_reward_model/` of the run."""

    label: ClassVar[str] = "after the process reward model"
    wish: ClassVar[str] = "process_reward_model without data asks an environment for solutions or tasks"
    kind: ClassVar[Literal["outcome", "process"]] = "process"
    writes: ClassVar[tuple[str, ...]] = ("steps.jsonl",)

    data: Annotated[str | None, Names("file")] = Field(
        None, description="a file of solutions with a label for each step"
    )
    solutions: int = Field(0, ge=0, description="made by the environment, with labels; 0 with another source")
    monte_carlo: MonteCarloSection | None = None
    supervise: Literal["all", "to_first_wrong"] = Field(
        "all", description="to_first_wrong: steps after the first wrong one are not trained on (PRM800K)"
    )
    separator: str = Field("\n", min_length=1, description="what stands between the steps of a solution")

    refusals: ClassVar[Refusals] = {
        "give one of process_reward_model.data, .solutions and .monte_carlo; got data={s.data!r}, "
        "solutions={s.solutions}, monte_carlo={s.monte_carlo!r}. Try solutions=256": lambda s: (
            (s.data is not None) + (s.solutions > 0) + (s.monte_carlo is not None) != 1
        ),
        "monte_carlo.tasks=1 cannot be split, and validation={s.validation} holds back whole tasks; try "
        "monte_carlo.tasks = 64, or validation = 0": lambda s: (
            s.monte_carlo and s.monte_carlo.tasks == 1 and s.validation
        ),
    }

    @property
    def made(self) -> tuple[int, str]:
        """The solutions that the environment or the policy makes: how many, and the keys that say so."""
        how = self.monte_carlo
        if how is None:
            return self.solutions, f"solutions={self.solutions}"
        keys = f"monte_carlo.tasks={how.tasks} with {how.solutions_per_task} solutions each"
        return how.tasks * how.solutions_per_task, keys
