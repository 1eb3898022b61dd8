"""What all sections of a recipe have in common, and what those of the rungs say of their rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Refusals = Mapping[str, Callable[..., object]]
"""Sentences that refuse, and when, in the order in which they are asked.

A sentence says what is wrong, the value received and a value that works. It is a format string of its
condition's arguments, such as `s`, the section.
"""


def refuse(refusals: Refusals, **facts: Any) -> None:
    """Raise ValueError with the first sentence whose condition holds of `facts`."""
    for sentence, holds in refusals.items():
        if holds(**facts):
            raise ValueError(sentence.format(**facts))


class Section(BaseModel):
    """A closed and immutable table: a key that is not listed is an error, and so is a contradiction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    refusals: ClassVar[Refusals] = {}
    """What no single key can see, asked in order once all keys are read; each class adds its own."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for kind in type(self).__mro__:
            refuse(vars(kind).get("refusals", {}), s=self)
        return self


class OptimizerKeys(Section):
    """The keys of an optimiser: AdamW with a rate that rises over the warm-up and then stays."""

    learning_rate: float = Field(
        1e-5, gt=0, allow_inf_nan=False, description="of AdamW, constant after the warm-up"
    )
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are scaled to this global norm")
    token_budget: int = Field(4096, ge=16, description="distinct tokens per micro-batch")
    max_minutes: float | None = Field(None, gt=0, description="no new step or epoch begins after this time")


class EarlyStopKeys(Section):
    """The keys of epochs that end when the loss on rows held out no longer falls."""

    epochs: int = Field(3, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(16, ge=1, description="rows per optimiser step")
    validation: int = Field(16, ge=0, description="rows that are held out; 0: no early stop")
    patience: int = Field(1, ge=1, description="epochs without a better validation loss before the stop")
    min_improvement: float = Field(
        0.002,
        ge=0,
        description="by how much a validation loss must be lower to count for patience; the weights of the "
        "lowest are kept in any case",
    )


class RungSection(Section):
    """The section of a rung, with what others ask of the rung without loading it."""

    label: ClassVar[str]
    """How reports call the evaluation after the rung."""
    wish: ClassVar[str]
    """What the rung does with an environment where it has no file of rows: the start of a sentence."""
    trains_policy: ClassVar[bool] = True
    """False: the rung leaves a model of its own in a folder of its name, and the policy is what it was."""
    rows: ClassVar[tuple[str, ...]] = ()
    """Files of training rows that the rung writes, which a resumed run cuts back like its metrics."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Other files that the rung puts into the run folder."""

    def wants_environment(self) -> str | None:
        """Return `wish` with its values filled in, or None where a file gives the rows."""
        return self.wish.format(s=self) if getattr(self, "data", None) is None else None


@dataclass(frozen=True, slots=True)
class Names:
    """Marks a key whose text names something on this machine.

    "file" is a file, a folder or a glob; "model" is a model folder, or else a name such as a hub's; "code" is
    an import path, which may begin with a file. The words in `but` are not paths.
    """

    kind: Literal["file", "model", "code"]
    but: tuple[str, ...] = ()
