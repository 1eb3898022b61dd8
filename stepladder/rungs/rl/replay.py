"""Demonstrations mixed into RL: what reinforcement does not ask for is not forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepladder.policies.policy import Policy
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.supervised import sft_gradients
from stepladder.types import TrainingSample


@dataclass(frozen=True, slots=True)
class Replay:
    """Adds `weight` times the SFT loss of `size` demonstrations to an update.

    Which ones follows from the seed, the step and the update, so there is nothing to save.
    """

    policy: Policy
    samples: Sequence[TrainingSample]
    weight: float
    size: int
    token_budget: int
    seed: int

    def at(self, step: int, update: int, token_budget: int | None = None) -> Callable[[], Metrics]:
        """What adds the gradients of one update, and returns its metrics."""
        budget = token_budget or self.token_budget

        def add() -> Metrics:
            rng = random.Random(f"{self.seed}/replay/{step}/{update}")
            chosen = rng.sample(self.samples, min(self.size, len(self.samples)))
            got = sft_gradients(self.policy, chosen, token_budget=budget, weight=self.weight)
            return {"replay_loss": got["loss"]}

        return add
