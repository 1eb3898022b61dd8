"""The section of rejection sampling: which of its own episodes the policy learns from."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stepladder.recipe.fitting import FittingSection
from stepladder.recipe.section import Refusals, Section


class Selection(Section):
    """Which of the episodes of a task are accepted; `stepladder sample` takes these keys too."""

    keep: Literal["all", "best", "shortest", "statistical"] = Field(
        "all",
        description="which accepted episodes of a task come first, up to `cap`: all in the order they were "
        "sampled, the highest score, the fewest sampled tokens, or by chance with "
        "exp((score - best score) / beta)",
    )
    cap: int = Field(4, ge=1, description="episodes of one task at most; 1 with `best` is best-of-n")
    require: Literal["auto", "solved", "scored"] = Field(
        "auto",
        description="solved: only episodes that succeeded; scored: any that has a score, for real-valued "
        "rewards; auto: scored with `statistical`, else solved",
    )
    beta: float | None = Field(
        None, gt=0, description="temperature of `statistical`: small accepts only scores near the best; 0.5"
    )

    refusals: ClassVar[Refusals] = {
        "beta={s.beta:g} is the temperature of statistical rejection sampling, but keep is {s.keep!r}; set "
        'keep = "statistical", or leave beta out': lambda s: s.beta is not None and s.keep != "statistical",
    }

    @property
    def required(self) -> Literal["solved", "scored"]:
        """What `require` stands for."""
        if self.require != "auto":
            return self.require
        return "scored" if self.keep == "statistical" else "solved"


class RejectionSamplingSection(Selection, FittingSection):
    """Sample episodes from the policy, keep the good ones, fine-tune on their own tokens; repeat."""

    label: ClassVar[str] = "after rejection sampling"
    wish: ClassVar[str] = "[rejection_sampling] plays episodes"
    rows: ClassVar[tuple[str, ...]] = ("accepted.jsonl", "pairs.jsonl")
    writes: ClassVar[tuple[str, ...]] = ("rejection_sampling_start.safetensors",)

    samples: int = Field(8, ge=1, description="episodes of each task")
    tasks: int = Field(128, ge=1, description="tasks a round, drawn from the training split")
    tasks_per_batch: int = Field(16, ge=1, description="tasks sampled between two places to stop at")
    rounds: int = Field(1, ge=1, description="of sampling and fine-tuning, each from the last one's policy")
    restart: bool = Field(
        False,
        description="true: each round fine-tunes the weights that the rung began with (STaR); false: those "
        "of the last round (RAFT)",
    )
    temperature: float | None = Field(None, gt=0, description="of sampling; unset: rollout.temperature")
    epochs: int = Field(2, ge=1, description="passes over the accepted episodes of the round, at most")
    batch_size: int = Field(16, ge=1, description="samples per optimiser step")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, constant after the warm-up")
    validation: int = Field(
        0, ge=0, description="accepted episodes held out, whole tasks at a time; 0: no early stop"
    )

    refusals: ClassVar[Refusals] = {
        "restart=true says where the second round starts, but rounds is 1; set rounds = 2, or leave restart "
        "out": lambda s: s.restart and s.rounds == 1,
    }
