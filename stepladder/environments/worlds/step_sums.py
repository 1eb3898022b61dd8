"""Sums worked out in steps: for reward models and process reward models, whose labels are known here.

A task is "3+4+9"; the answer is a line for each addition, and the last result counts:

    3+4=7
    7+9=16

The reward is 1 where the last line ends with the right result. `preferences` and `step_solutions` make wrong
answers by putting a wrong result into one line and working on from it.
"""

from __future__ import annotations

import random

from stepladder.boundary import require_index
from stepladder.data.files.records import Preference, Steps
from stepladder.errors import ConfigError
from stepladder.types import Message, Reset, Step, Task


class StepSumsWorld:
    """Tasks by (seed, split, index). `terms`: how many numbers, from 1 to `largest`, are added.

    The splits share the facts such as 3+4=7, which are what there is to learn; their sums are drawn apart.
    """

    disjoint_splits = False  # small sums recur

    def __init__(
        self, *, terms: int = 4, largest: int = 9, seed: int = 0, train: int = 100_000, test: int = 1_000
    ) -> None:
        if largest < 2:
            raise ConfigError(f"largest must be at least 2, such as 9; got {largest}")
        if terms < 2:
            raise ConfigError(f"terms must be at least 2, so that there is a step; got {terms}")
        self.terms, self.largest, self.seed = terms, largest, seed
        self.sizes = {"train": train, "test": test}

    def splits(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def count(self, split: str) -> int:
        return self.sizes[split]

    def get(self, split: str, i: int) -> Task:
        require_index(self.count(split), split, i)
        numbers = self._numbers(random.Random(f"{self.seed}/{split}/{i}"))
        return Task(
            id=f"{split}/{i}",
            split=split,
            domain="step_sums",
            messages=(self._question(numbers),),
            reference=str(sum(numbers)),
            seed=i,
        )

    def make(self) -> StepSumsEnvironment:
        return StepSumsEnvironment()

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Right answers."""
        rng = self._rng("demonstration", seed)
        drawn = [self._numbers(rng) for _ in range(count)]
        return [[self._question(n), Message("assistant", "\n".join(self._steps(n)[0]))] for n in drawn]

    def preferences(self, count: int, seed: int = 0) -> list[Preference]:
        """A right answer, and one with a wrong step, to each of `count` sums."""
        rng, out = self._rng("preference", seed), []
        for _ in range(count):
            numbers = self._numbers(rng)
            wrong = self._steps(numbers, wrong_at=rng.randrange(self.terms - 1), rng=rng)[0]
            sides = (self._steps(numbers)[0], wrong)
            chosen, rejected = ((Message("assistant", "\n".join(side)),) for side in sides)
            out.append(Preference((self._question(numbers),), chosen, rejected))
        return out

    def step_solutions(self, count: int, seed: int = 0) -> list[Steps]:
        """Solutions, about half with a wrong step; labels are 1 before it and 0 from it on."""
        rng, out = self._rng("steps", seed), []
        for _ in range(count):
            numbers = self._numbers(rng)
            wrong_at = rng.randrange(self.terms - 1) if rng.random() < 0.5 else None
            steps, labels = self._steps(numbers, wrong_at=wrong_at, rng=rng)
            out.append(Steps((self._question(numbers),), tuple(steps), tuple(labels)))
        return out

    def _rng(self, purpose: str, seed: int) -> random.Random:
        return random.Random(f"{self.seed}/{purpose}/{seed}")

    def _numbers(self, rng: random.Random) -> list[int]:
        return [rng.randint(1, self.largest) for _ in range(self.terms)]

    def _question(self, numbers: list[int]) -> Message:
        return Message("user", "+".join(map(str, numbers)))

    def _steps(
        self, numbers: list[int], *, wrong_at: int | None = None, rng: random.Random | None = None
    ) -> tuple[list[str], list[float]]:
        """(lines, labels); line `wrong_at` has a wrong result, and the lines after it work on from that."""
        total, steps, labels = numbers[0], [], []
        for k, number in enumerate(numbers[1:]):
            result = total + number
            if k == wrong_at and rng is not None:
                result += rng.choice(
                    [d for d in range(-self.largest, self.largest + 1) if d and result + d > 0]
                )
            steps.append(f"{total}+{number}={result}")
            labels.append(1.0 if wrong_at is None or k < wrong_at else 0.0)
            total = result
        return steps, labels


class StepSumsEnvironment:
    """One sum; one answer ends the episode."""

    inline = True

    def __init__(self) -> None:
        self._reference = ""

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self._reference = str(task.reference)
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        correct = float(message.text.strip().rpartition("=")[2] == self._reference)
        return Step(reward=correct, terminated=True, rewards={"correct": correct})
