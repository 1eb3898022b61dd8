"""Hidden-digit worlds in which one part dies, hangs, leaves or cannot be read, for test_faults.py."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path
from typing import Any

from stepladder.environments.worlds.hidden_digit import HiddenDigitEnvironment, HiddenDigitWorld
from stepladder.types import Message, Reset, Step, Task


class Uneven(HiddenDigitWorld):
    """Every seventh task takes its time, so that an asynchronous run plays ahead. `flag`: a file."""

    def __init__(self, *, train: int = 100, test: int = 20, flag: str = "", url: str = "") -> None:
        super().__init__(train=train, test=test)
        self.flag, self.url = Path(flag), url

    def make(self) -> HiddenDigitEnvironment:
        return UnevenEpisode(self)


class UnevenEpisode(HiddenDigitEnvironment):
    inline = False

    def __init__(self, world: Uneven) -> None:
        super().__init__()
        self.world, self.task = world, -1

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.task = int(task.id.split("/")[1]) if task.split == "train" else -1
        return await super().reset(task, seed=seed)

    async def step(self, message: Message) -> Step:
        if self.task % 7 == 0:
            await asyncio.sleep(0.1)
        return await super().step(message)


class Unreadable(Uneven):
    """Task 3 cannot be read, until the flag is there."""

    def get(self, split: str, i: int) -> Task:
        if split == "train" and i == 3 and not self.flag.is_file():
            raise OSError("bad sector")
        return super().get(split, i)


class Leaving(Uneven):
    """The episodes of one task in five end as a killed worker does: cancelled."""

    def make(self) -> HiddenDigitEnvironment:
        return Leaver(self)


class Leaver(UnevenEpisode):
    async def step(self, message: Message) -> Step:
        if self.task % 5 == 2:
            raise asyncio.CancelledError
        return await super().step(message)


class Stopping(Uneven):
    """One episode cancels the job that plays it."""

    def make(self) -> HiddenDigitEnvironment:
        return Stopper(self)


class Stopper(UnevenEpisode):
    inline = True

    async def step(self, message: Message) -> Step:
        if self.task % 5 == 2:
            job = asyncio.current_task()
            assert job is not None
            job.cancel()
            await asyncio.sleep(0)
        return await super().step(message)


class Hanging(Uneven):
    """A call for one task in five does not come back; it leaves the flag."""

    def make(self) -> HiddenDigitEnvironment:
        return Hanger(self)


class Hanger(UnevenEpisode):
    def step(self, message: Message) -> Any:  # type: ignore[override]
        if self.task % 5 == 2:
            self.world.flag.touch()
            time.sleep(60)
        return super().step(message)


class Talking(Uneven):
    """The longer the answer, the better."""

    def make(self) -> HiddenDigitEnvironment:
        return Talker(self)


class Talker(UnevenEpisode):
    async def step(self, message: Message) -> Step:
        return Step(reward=len(str(message.content)) / 10, terminated=True)


class Served(Uneven):
    """Reset and each step ask the service at `url`."""

    def make(self) -> HiddenDigitEnvironment:
        return Asker(self)


class Asker(UnevenEpisode):
    def reset(self, task: Task, *, seed: int) -> Any:  # type: ignore[override]
        self.ask()
        return super().reset(task, seed=seed)

    def step(self, message: Message) -> Any:  # type: ignore[override]
        self.ask()
        return super().step(message)

    def ask(self) -> None:
        with urllib.request.urlopen(self.world.url, timeout=5) as answer:
            assert answer.read() == b"here"
