"""The hidden digit behind a slow tool: episodes last from 10 ms to 3 s, most of them short (log-uniform).

How long a task takes follows from its seed, so a loop that trains on fast tasks only would be seen.
"""

from __future__ import annotations

import asyncio
import random

from stepladder.environments.worlds.hidden_digit import HiddenDigitEnvironment, HiddenDigitWorld
from stepladder.types import Message, Reset, Step, Task


class LongTail(HiddenDigitWorld):
    """`fast` and `slow`: the shortest and the longest episode, in seconds. `train`: how many tasks."""

    def __init__(self, *, fast: float = 0.01, slow: float = 3.0, train: int = 64, test: int = 200) -> None:
        super().__init__(train=train, test=test)
        self.fast, self.slow = fast, slow

    def make(self) -> HiddenDigitEnvironment:
        return Slow(self)


class Slow(HiddenDigitEnvironment):
    """Half of the episode's time passes before each answer of the environment."""

    inline = False

    def __init__(self, world: LongTail) -> None:
        super().__init__(bonus=world.bonus, strict=world.strict, plain=world.plain)
        self._world = world
        self._seconds = 0.0

    async def reset(self, task: Task, *, seed: int) -> Reset:
        share = random.Random(f"latency/{task.seed}").random() if task.split == "train" else 0.0
        self._seconds = self._world.fast * (self._world.slow / self._world.fast) ** share
        return await super().reset(task, seed=seed)

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(self._seconds / 2)
        return await super().step(message)
