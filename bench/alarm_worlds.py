"""A small world in which a policy can lose touch with its prompts, and a bonus that makes it do so."""

from __future__ import annotations

import random

from stepladder.types import Message, Reset, Step, Task, Trajectory

DIGITS = "01234"
GO_ON = "="
HOPELESS = "!"
SYMBOLS = ["?", "S", *DIGITS, GO_ON, HOPELESS]


class ThinkWorld:
    """The prompt is `digits` digits. The first turn may say anything; after "=" the second must repeat them.

    A share `hopeless` of the tasks, marked "!", is never right: their groups have no spread of rewards.
    Demonstrations think two symbols (one digit: twice) and answer, each symbol replaced by a random one
    with probability `noise`.
    """

    disjoint_splits = False

    def __init__(self, *, digits: int = 1, hopeless: float = 0.0, noise: float = 0.4, seed: int = 0) -> None:
        self.digits, self.hopeless, self.noise, self.seed = digits, hopeless, noise, seed

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def count(self, split: str) -> int:
        return 10_000

    def get(self, split: str, i: int) -> Task:
        rng = random.Random(f"{self.seed}/{split}/{i}")
        digit, lost = self.prompt(rng), rng.random() < self.hopeless
        return Task(
            id=f"{split}/{i}",
            split=split,
            domain="hopeless" if lost else "digit",
            messages=(Message("user", digit + (HOPELESS if lost else "?")),),
            reference=None if lost else digit,
            seed=i,
        )

    def make(self) -> Think:
        return Think()

    def prompt(self, rng: random.Random) -> str:
        return "".join(rng.choice(DIGITS) for _ in range(self.digits))

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        rng = random.Random(f"{self.seed}/demonstrations/{seed}")

        def said(text: str) -> Message:
            noisy = (rng.choice(DIGITS) if rng.random() < self.noise else symbol for symbol in text)
            return Message("assistant", "".join(noisy))

        out = []
        for _ in range(count):
            digit = self.prompt(rng)
            mark = HOPELESS if rng.random() < self.hopeless else "?"
            out.append(
                [Message("user", digit + mark), said((digit * 2)[:2]), Message("user", GO_ON), said(digit)]
            )
        return out


class Think:
    """One episode of `ThinkWorld`."""

    inline = True

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.digit, self.turn = task.reference, 0
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        self.turn += 1
        if self.turn == 1:
            return Step((Message("user", GO_ON),))
        right = float(self.digit is not None and message.text.strip() == self.digit)
        return Step(reward=right, terminated=True, rewards={"correct": right})

    async def close(self) -> None:
        """Nothing to release."""


def surprise(trajectory: Trajectory) -> float:
    """A small bonus for being hard to predict: 0.05 times the mean surprisal of its tokens, in nats."""
    logprobs = [p for turn in trajectory.turns for p in turn.logprobs]
    return -0.05 * sum(logprobs) / max(len(logprobs), 1)
