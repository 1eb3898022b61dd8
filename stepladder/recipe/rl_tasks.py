"""Tables of [rl] about what is played: which tasks, and how long their episodes may be."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import Refusals, Section


class TasksSection(Section):
    """Which tasks are played, and which of their groups are trained on."""

    sampling: Literal["uniform", "adaptive", "prioritised", "curriculum"] = Field(
        "uniform",
        description="adaptive: domains by p(1-p) of their moving success, with a floor; prioritised: tasks "
        "by 1 - p; curriculum: levels (`level` in a task's data) open one by one as the last is half solved",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="passes over the tasks after which RL ends, with a smaller last batch where they do not "
        "fill it; unset: as many as `rl.steps` take. With uniform sampling only",
    )
    dynamic_sampling: bool | None = Field(
        None, description="drop groups whose members all earn the same and play others instead; dapo: true"
    )
    max_refills: int = Field(
        8, ge=0, description="rounds of such other groups in one step; none left that differs: the run stops"
    )
    keep_groups: float = Field(
        1.0, gt=0, le=1, description="share of the groups, those of the widest rewards, that is trained on"
    )

    refusals: ClassVar[Refusals] = {
        "epochs={s.epochs} promises every task equally often, and sampling={s.sampling!r} chooses among "
        "them; set sampling = 'uniform', or leave epochs out and end by rl.steps": lambda s: (
            s.epochs is not None and s.sampling != "uniform"
        ),
    }


class HorizonSection(Section):
    """Episodes that are short at first."""

    start: int | None = Field(
        None, ge=1, description="turns per episode at first, growing to rollout.max_turns; unset: no limit"
    )
    every: int = Field(10, ge=1, description="steps for each turn that the horizon grows")
