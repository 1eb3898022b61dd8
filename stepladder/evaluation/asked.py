"""What a person asks of an evaluation; contradictions are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepladder.errors import ConfigError
from stepladder.evaluation.beam import Beam
from stepladder.evaluation.curves import Kind


@dataclass(frozen=True, slots=True)
class Asked:
    """What is played and how it is read.

    `budgets` are limits of the sampled tokens per turn; where there are none, the recipe's holds. `reward`,
    `answer` and `step_scorer` are import paths.
    """

    environment: str
    overrides: Sequence[str] = ()
    tasks: int = 100
    split: str = "test"
    samples: int = 1
    ks: tuple[int, ...] = ()
    temperature: float = 1.0
    seed: int = 0
    endpoint_model: str = ""
    reward: str | None = None
    answer: str | None = None
    budgets: tuple[int, ...] = ()
    beam: Beam | None = None
    step_scorer: str | None = None

    def __post_init__(self) -> None:
        if (self.samples > 1 or self.beam) and self.temperature == 0:
            n = self.beam.num_samples if self.beam else self.samples
            raise ConfigError(f"{n} samples at temperature 0 are all the same; give --temperature 1.0")
        if (self.beam is None) != (self.step_scorer is None):
            raise ConfigError(
                "a beam search needs both --beam, the samples per step, such as 16, and --step-scorer, the "
                "import path of f(messages, partials) -> scores"
            )
        if over := [k for k in self.ks if not 1 <= k <= self.samples]:
            raise ConfigError(
                f"k={over[0]} must lie between 1 and the samples of a task, {self.samples}; draw more "
                f"(--samples {max(over)}) or ask for fewer"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the k of the curves: as asked, else the powers of 2 up to the samples, and all of them."""
        powers = [2**i for i in range(20) if 2**i <= self.samples]
        return tuple(sorted(set(self.ks or (*powers, self.samples))))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the ways of using samples that make sense of what is asked."""
        if self.samples == 1:
            return ("pass",)
        return ("pass", "maj", "best", "weighted") if self.reward else ("pass", "maj")
