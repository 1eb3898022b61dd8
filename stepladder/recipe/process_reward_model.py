"""The section of process reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import Names

SOLUTIONS_PER_TASK = 4


class ProcessRewardModelSection(ScoringSection):
    """A process reward model on labelled steps, saved to `process_reward_model/` of the run."""

    label: ClassVar[str] = "after the process reward model"
    kind: ClassVar[Literal["outcome", "process"]] = "process"
    writes: ClassVar[tuple[str, ...]] = ("steps.jsonl",)

    data: Annotated[str | None, Names("file")] = Field(
        None, description="a file of solutions with a label for each step"
    )
    solutions: int = Field(0, ge=0, description="made by the environment, with labels; 0 with another source")
    tasks: int = Field(
        0,
        ge=0,
        description="training tasks that the policy solves; its steps are labelled by Monte Carlo rollouts "
        "(Math-Shepherd); 0 with another source",
    )
    solutions_per_task: int | None = Field(None, ge=1, description="sampled, with `tasks`; unset: 4")
    completions: int | None = Field(None, ge=1, description="sampled after each step, with `tasks`; unset: 8")
    labels: Literal["hard", "soft"] | None = Field(
        None,
        description="with `tasks`. hard: 1 where any completion is right; soft: the share of right ones; "
        "unset: hard",
    )
    supervise: Literal["all", "to_first_wrong"] = Field(
        "all", description="to_first_wrong: steps after the first wrong one are not trained on (PRM800K)"
    )
    separator: str = Field("\n", min_length=1, description="what stands between the steps of a solution")

    def wants_environment(self) -> str | None:
        """Return what is asked of it: solutions, or tasks to be solved."""
        asks = "process_reward_model without data asks an environment for solutions or tasks"
        return asks if self.data is None else None

    refusals = (
        (
            lambda s: (s.data is not None) + (s.solutions > 0) + (s.tasks > 0) != 1,
            "give one of process_reward_model.data, .solutions and .tasks; got data={s.data!r}, solutions="
            "{s.solutions}, tasks={s.tasks}. Try solutions=256",
        ),
        *(
            (
                lambda s, key=key: getattr(s, key) is not None and not s.tasks,
                f"{key}={{s.{key}!r}} is about labels made by rollouts, and process_reward_model.tasks is 0; "
                "leave it out, or set tasks = 64",
            )
            for key in ("solutions_per_task", "completions", "labels")
        ),
        (
            lambda s: 0 < s.solutions <= s.validation,
            lambda s: s.too_few(f"solutions={s.solutions}", s.solutions),
        ),
        (
            lambda s: 0 < s.tasks * s.each <= s.validation,
            lambda s: s.too_few(f"tasks={s.tasks} with {s.each} solutions each", s.tasks * s.each),
        ),
        (
            lambda s: s.tasks == 1 and s.validation,
            "tasks=1 cannot be split, and validation={s.validation} holds back whole tasks; try tasks = 64, "
            "or validation = 0",
        ),
    )

    @property
    def each(self) -> int:
        """Return how many solutions of each task are sampled."""
        return self.solutions_per_task or SOLUTIONS_PER_TASK
