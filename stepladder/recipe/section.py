"""What all sections of a recipe have in common, and what those of the rungs say of their rung."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A closed and immutable table: a key that is not listed is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RungSection(Section):
    """The section of a rung, with what others ask of the rung without loading it."""

    label: ClassVar[str]
    """How reports call the evaluation after the rung."""
    trains_policy: ClassVar[bool] = True
    """False: the rung leaves a model of its own in a folder of its name, and the policy is what it was."""
    rows: ClassVar[tuple[str, ...]] = ()
    """Files of training rows that the rung writes, which a resumed run cuts back like its metrics."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Other files that the rung puts into the run folder."""


@dataclass(frozen=True, slots=True)
class Names:
    """Marks a key whose text names something on this machine.

    "file" is a file, a folder or a glob; "model" is a model folder, or else a name such as a hub's; "code" is
    an import path, which may begin with a file. The words in `but` are not paths.
    """

    kind: Literal["file", "model", "code"]
    but: tuple[str, ...] = ()
