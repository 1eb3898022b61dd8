"""The world of bench/variance.py: the first answer decides, the reward comes at the end."""

from __future__ import annotations

import random
from typing import Any

from stepladder.types import Message, Reset, Step, Task

DIGITS = "01234"
RIGHT = "3"


class Late:
    """`turns` questions; a first answer of "3" earns `right` after the last one, any other `wrong`.

    The state shows it: from the second question on "A" is asked after a right first answer, else "B".
    Demonstrations answer every question with a random digit. Tasks are endless and all alike.
    """

    disjoint_splits = False

    def __init__(self, turns: int = 8, right: float = 1.0, wrong: float = 0.0) -> None:
        self.turns, self.right, self.wrong = turns, right, wrong

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def count(self, split: str) -> int:
        return 100_000 if split == "train" else 1000

    def get(self, split: str, i: int) -> Task:
        return Task(f"{split}/{i}", split, "late", (Message("user", "?"),), seed=i)

    def make(self) -> Any:
        return _Late(self)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        rng = random.Random(f"demonstration/{seed}")

        def one() -> list[Message]:
            first = rng.choice(DIGITS)
            said = [Message("user", "?"), Message("assistant", first)]
            for _ in range(1, self.turns):
                said += [question(first), Message("assistant", rng.choice(DIGITS))]
            return said

        return [one() for _ in range(count)]


class _Late:
    inline = True

    def __init__(self, world: Late) -> None:
        self.world = world

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.said: list[str] = []
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        self.said.append(message.text)
        if len(self.said) < self.world.turns:
            return Step((question(self.said[0]),))
        right = self.said[0] == RIGHT
        reward = self.world.right if right else self.world.wrong
        return Step(reward=reward, terminated=True, info={"success": right})


def question(first: str) -> Message:
    return Message("user", "A" if first == RIGHT else "B")
