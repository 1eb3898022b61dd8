"""Which tasks come next: every task of the split once an epoch, in a shuffled order that a seed fixes.

The sampler's whole state is a cursor and a moving success rate a domain, so that a resumed run goes on
with exactly the tasks an uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Literal

from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.types import Task


class TaskSampler:
    """`next(n)` gives n (group id, task) pairs.

    "uniform" takes every task. "adaptive" walks the same order but skips tasks of domains that teach
    little now: a domain is kept with a weight of p(1-p) of its moving success p, at least .2 while it is
    mostly unsolved (so that it is not given up) and .04 once it is solved (so that it is not forgotten).
    """

    def __init__(
        self, world: CheckedWorld, split: str, *, mode: Literal["uniform", "adaptive"], seed: int
    ) -> None:
        self.world, self.split, self.mode, self.seed = world, split, mode, seed
        self.count = world.count(split)
        if self.count < 1:
            raise ConfigError(
                f"the split {split!r} has no tasks; give it at least one (splits: {list(world.splits())})"
            )
        self.cursor = 0
        self.success: dict[str, float] = {}

    def next(self, n: int) -> list[tuple[str, Task]]:
        """The next `n` tasks; the group id names the draw, so a task of a later epoch is another group."""
        drawn: list[tuple[str, Task]] = []
        while len(drawn) < n:
            cursor = self.cursor
            self.cursor += 1
            task = self.world.get(self.split, self._index(cursor))
            if self.mode == "uniform" or self._kept(task.domain, cursor):
                drawn.append((f"{self.split}-{cursor}", task))
        return drawn

    def observe(self, domain: str, success: float) -> None:
        """A finished group of `domain` had this share of successes."""
        self.success[domain] = 0.8 * self.success.get(domain, 0.5) + 0.2 * success

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "success": dict(self.success)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.cursor = int(state["cursor"])
        self.success = {str(k): float(v) for k, v in state["success"].items()}

    def _index(self, cursor: int) -> int:
        """An affine shuffle of the epoch: visits every index once, needs no memory."""
        epoch, place = divmod(cursor, self.count)
        rng = random.Random(f"{self.seed}/{self.split}/{epoch}")
        factor = rng.randrange(1, self.count + 1)
        while math.gcd(factor, self.count) != 1:
            factor = rng.randrange(1, self.count + 1)
        return (factor * place + rng.randrange(self.count)) % self.count

    def _kept(self, domain: str, cursor: int) -> bool:
        weight = _weight(self.success.get(domain, 0.5))
        heaviest = max([_weight(p) for p in self.success.values()] + [0.25])
        return random.Random(f"{self.seed}/keep/{cursor}").random() < weight / heaviest


def _weight(p: float) -> float:
    return max(p * (1 - p), 0.2 if p < 0.5 else 0.04)
