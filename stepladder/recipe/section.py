"""What all sections of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Closed and immutable: a key that is not listed is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
