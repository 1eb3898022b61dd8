"""The section of reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import Names


class RewardModelSection(ScoringSection):
    """A reward model on pairs or rankings (Bradley-Terry), saved to `reward_model/` of the run."""

    label: ClassVar[str] = "after the reward model"
    kind: ClassVar[Literal["outcome", "process"]] = "outcome"

    pairs: int = Field(0, ge=0, description="made by the environment; 0 with `data`")
    data: Annotated[str | None, Names("file")] = Field(None, description="a file of preferences or rankings")
    margin: float | Literal["data"] = Field(
        0.0,
        description="how much higher the better score must be: a number for all pairs, or data: what the "
        "file says of each (Llama 2)",
    )
    centring: float = Field(
        0.01, ge=0, description="weight of (r_w + r_l)², which fixes the offset of the scores near 0"
    )

    def wants_environment(self) -> str | None:
        """Return what is asked of it: pairs."""
        return f"reward_model.pairs={self.pairs} asks an environment for pairs" if self.data is None else None

    refusals = (
        (
            lambda s: (s.data is None) == (s.pairs == 0),
            "give either reward_model.data or reward_model.pairs; got data={s.data!r} and pairs={s.pairs}. "
            "Try pairs=256",
        ),
        (
            lambda s: 0 < s.pairs <= s.validation,
            lambda s: s.too_few(f"pairs={s.pairs}", s.pairs),
        ),
        (
            lambda s: s.margin == "data" and s.data is None,
            'margin="data" needs a file; with pairs, give a number such as margin = 0.0',
        ),
    )
