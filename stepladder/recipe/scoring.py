"""What the sections of reward models have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import EarlyStopKeys, OptimizerKeys, Refusals, RungSection


class ScoringSection(OptimizerKeys, EarlyStopKeys, RungSection):
    """Epochs over scored rows on a copy of the policy, which itself stays as it is."""

    trains_policy: ClassVar[bool] = False
    kind: ClassVar[Literal["outcome", "process"]]
    """What its model scores: a whole answer, or each step of it."""

    validation: int = Field(
        32,
        ge=0,
        description="rows held out, whose prompts no training row has; 0: no early stop, and nothing is "
        "known of the accuracy",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longer prompts lose their beginning; unset: no limit"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="longer answers lose their end; unset: no limit"
    )

    refusals: ClassVar[Refusals] = {
        "{s.made[1]} leaves nothing to train on, for validation={s.validation} holds back as many; try "
        "validation = {s.fewer}": lambda s: 0 < s.made[0] <= s.validation,
    }

    @property
    def made(self) -> tuple[int, str]:
        """The rows that are still to be made: how many (0 with a file), and the keys that say so."""
        raise NotImplementedError

    @property
    def fewer(self) -> int:
        """A `validation` that leaves rows to train on."""
        return self.made[0] // 5
