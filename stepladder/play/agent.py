"""Who acts in an episode, as the loop sees it: four verbs, begin, act, observe and record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepladder.types import FinishReason, Message, Tool, TrainingSample, Turn


@dataclass(frozen=True, slots=True)
class Act:
    """One assistant message and why it ended; "context" when there was no room to say anything."""

    message: Message | None
    finish_reason: FinishReason | str


@dataclass(frozen=True, slots=True)
class Record:
    """What an episode leaves behind besides its rewards."""

    messages: tuple[Message, ...]
    turns: tuple[Turn, ...] = ()
    samples: tuple[TrainingSample, ...] = ()


class Agent(Protocol):
    """One per episode. `close` frees what it holds and may be called twice."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None: ...

    async def act(self, seed: int) -> Act: ...

    def observe(self, messages: Sequence[Message]) -> None: ...

    def record(self, trajectory_id: str, group_id: str) -> Record: ...

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]: ...

    def close(self) -> None: ...


Agents = Callable[[str], Agent]
"""Makes the agent of an episode from its key; keys order a deterministic engine."""
