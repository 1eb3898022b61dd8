"""Small worlds for the benchmarks of credit and domains, for a model with an alphabet of its own."""

from __future__ import annotations

import random
from typing import Any

from stepladder.types import Message, Reset, Step, Task

DIGITS = "01234"


class _World:
    """Endless tasks that differ in their seed only, and demonstrations of random digits."""

    disjoint_splits = False
    question = "?"

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def count(self, split: str) -> int:
        return 100_000 if split == "train" else 1000

    def get(self, split: str, i: int) -> Task:
        seed = i + 1_000_000 * (split == "test")
        messages = (Message("user", self.question),)
        return Task(f"{split}/{i}", split, type(self).__name__.lower(), messages, seed=seed)

    def act(self, rng: random.Random) -> str:
        return rng.choice(DIGITS)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        rng = random.Random(f"demonstration/{seed}")
        return [[Message("user", self.question), Message("assistant", self.act(rng))] for _ in range(count)]


class Decisive(_World):
    """Eight turns. The first decides: "3" is worth 1. The other seven are chores that pay -`luck` to `luck`,
    whatever is said: each answer has its own luck in each task. late: the first is paid for at the end,
    2 or, for having come there, 1.
    """

    def __init__(self, luck: float = 1.0, late: bool = False) -> None:
        self.luck, self.late = luck, late

    def make(self) -> Any:
        return _Decisive(self.luck, self.late)


class _Decisive:
    inline = True

    def __init__(self, luck: float, late: bool) -> None:
        self.luck, self.late = luck, late

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.seed, self.said, self.right = seed, [], 0.0
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        self.said.append(message.text)
        if len(self.said) == 1:
            self.right = float(message.text == "3")
            reward = 0.0 if self.late else self.right
        else:
            reward = self.luck * random.Random(f"{self.seed}/{self.said}").uniform(-1, 1)
        over = len(self.said) == 8
        if over and self.late:
            reward += 1 + self.right
        return Step(
            () if over else (Message("user", str((len(self.said) + 1) % 5)),),
            reward=reward,
            terminated=over,
            info={"success": self.right == 1.0},
        )


class Farm(_World):
    """A hidden digit, 0 to 2. Asking ("S") shows it, as often as one asks; the right digit is worth 1."""

    def make(self) -> Any:
        return _Farm()

    def act(self, rng: random.Random) -> str:
        return rng.choice(DIGITS[:3] + "S")


class _Farm:
    inline = True

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.digit = random.Random(f"farm/{seed}").choice(DIGITS[:3])
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        if message.text == "S":
            return Step((Message("user", self.digit),))
        right = float(message.text == self.digit)
        return Step(reward=right, terminated=True, rewards={"correct": right})


class Scaled(_World):
    """One turn: a question has one right digit, worth `worth`."""

    def __init__(self, question: str = "A", answer: str = "1", worth: float = 1.0) -> None:
        self.question, self.answer, self.worth = question, answer, worth

    def make(self) -> Any:
        return _Scaled(self.answer, self.worth)


class _Scaled:
    inline = True

    def __init__(self, answer: str, worth: float) -> None:
        self.answer, self.worth = answer, worth

    async def reset(self, task: Task, *, seed: int) -> Reset:
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        right = message.text == self.answer
        return Step(reward=self.worth * right, terminated=True, info={"success": right})
