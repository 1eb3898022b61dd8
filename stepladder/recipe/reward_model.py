"""The section of reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import Names, Refusals


class RewardModelSection(ScoringSection):
    """A reward model on pairs or rankings (Bradley-Terry), saved to `reward_model/` of the run."""

    label: ClassVar[str] = "after the reward model"
    wish: ClassVar[str] = "reward_model.pairs={s.pairs} asks an environment for pairs"
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

    refusals: ClassVar[Refusals] = {
        "give either reward_model.data or reward_model.pairs; got data={s.data!r} and pairs={s.pairs}. "
        "Try pairs=256": lambda s: (s.data is None) == (s.pairs == 0),
        'margin="data" needs a file; with pairs, give a number such as margin = 0.0': lambda s: (
            s.margin == "data" and s.data is None
        ),
    }

    @property
    def made(self) -> tuple[int, str]:
        """The rows that the environment makes: how many, and the keys that say so."""
        return self.pairs, f"pairs={self.pairs}"
