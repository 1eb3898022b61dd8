"""How messages and texts become token ids, as those who make training samples see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from stepladder.types import Message, Tool, TrainingSample

Side: TypeAlias = "str | Sequence[Message]"
"""A prompt or a completion. A string is taken as it is, without the chat template."""
Train: TypeAlias = Literal["assistant", "completion", "last_turn", "full"]


@runtime_checkable
class Encoder(Protocol):
    """A tokenizer with its chat template (`data.chat.renderer.Renderer`), or without one (`PlainText`)."""

    stop_token_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens shown."""

    def whole_text(self, text: str) -> list[int]:
        """Return the ids of a text that no template wraps, from its BOS to the end-of-sequence token."""

    def demonstration(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        trajectory_id: str,
        group_id: str,
        train: Train = "assistant",
        answers_from: int = 0,
    ) -> tuple[TrainingSample, ...]:
        """Return the samples of a conversation to imitate; see `data.chat.demonstration.demonstrate`."""

    def completed(
        self, prompt: Side, completion: Side, tools: Sequence[Tool], *, trajectory_id: str, group_id: str
    ) -> TrainingSample | None:
        """Return a prompt with its completion, the mask True on what the assistant says in the latter.

        None where the template rewrites earlier turns, so that they are not one sequence. Raises DataError
        for an empty prompt or sides of two kinds, TemplateError where messages cannot be rendered.
        """

    def frame(self, prompt: Side, tools: Sequence[Tool], prompt_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return how many tokens at either end of a prompt are its frame: a BOS, and what opens the
        assistant's turn. None where the latter cannot be told from the rest."""

    def answered(self, prompt: Sequence[Message], answer: str) -> tuple[tuple[int, ...], str, str]:
        """Return (ids of the prompt, shielded text of the answer, its terminator)."""

    def shield(self, text: str) -> str:
        """Return a part of an answer as `answered` shields it."""

    def encode(self, shielded: str, *, after: int | None = None) -> list[int]:
        """Return the ids of a shielded text that follows the token `after`."""
