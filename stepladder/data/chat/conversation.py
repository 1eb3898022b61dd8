"""One conversation as token ids: who wrote each token is known from who appended it, never from its text.

The next prompt is the previous ids plus the delta of the template. Sampled ids are never rendered again:
the template re-renders the whole history as text, and that text is only used to find (1) whether anything
said before has changed and (2) what follows the assistant's turn. What the model wrote may be spelled
differently by the template (JSON spacing, trimmed white space) as long as it reads the same; a template that
takes something away (an earlier thinking block) has edited history, and a new sample begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from stepladder.data.chat.dialect import ChatDict
from stepladder.data.chat.parsers import ParsedText
from stepladder.data.chat.template import ChatTemplate, images_of
from stepladder.errors import EngineError, InvariantError, TemplateError
from stepladder.types import Generation, ImagePart, Message, Sampling, Tool, TrainingSample, Turn

Meaning: TypeAlias = tuple[str, str, tuple[object, ...]]
_THINK_PREFIX = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


@dataclass(slots=True)
class _Segment:
    """Ids with their author, as parallel columns; one becomes one training sample."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)  # -1: not sampled
    mask: list[bool] = field(default_factory=list)
    committed: int = 0  # length up to the last sampled token; what follows is the current prompt's tail
    images: list[ImagePart] = field(default_factory=list)

    def append(self, ids: Sequence[int], logprobs: Sequence[float], turn: int, trained: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.turn_ids += [turn] * len(ids)
        self.mask += [trained] * len(ids)

    def cut(self, length: int) -> None:
        for column in (self.ids, self.logprobs, self.turn_ids, self.mask):
            del column[length:]


class Conversation:
    """Made by `Renderer.start`; see there for an example. Not thread-safe.

    `neutralised` counts the control markers in content that were encoded as plain text.
    `history_edits` counts how often the template rewrote what was already said.
    """

    def __init__(
        self, renderer: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> None:
        self._renderer = renderer
        self._tools = renderer.tool_dicts(tools)
        self._messages: list[Message] = list(messages)
        self._dicts: list[ChatDict] = renderer.chat_dicts(messages, first=True)
        self._turns: list[Turn] = []
        self._segments: list[_Segment] = []
        self._awaiting = True  # the ids end with a generation prompt
        self._last_meaning: Meaning | None = None  # what the last turn says
        self._last_prefix = ""  # the thinking tag its prompt opened
        self._last_index = -1  # its place among the dicts
        self._last_message = -1  # ... and among the messages
        self.neutralised = renderer.control.count(str((self._tools, self._dicts)))
        self.history_edits = 0
        text = self._render(len(self._dicts), generation_prompt=True)
        self._next_text = text  # the template's text of the prompt that comes next
        self._prompt_text = text  # ... and of the prompt that the last turn was sampled from
        self._begin_segment(text)

    # -- reading ------------------------------------------------------------------------------------------

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far."""
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """One record per model call: the exact prompt ids and what was sampled after them."""
        return tuple(self._turns)

    @property
    def num_tokens(self) -> int:
        """Length of the current context, sampled tokens included."""
        return len(self._segments[-1].ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The next prompt, ending with the generation prompt."""
        if not self._awaiting:
            raise InvariantError(
                "the last message is the assistant's own, so there is nothing to answer yet; "
                "call add_messages with what the environment replied"
            )
        return tuple(self._segments[-1].ids)

    @property
    def think_prefix(self) -> str:
        """The thinking tag that the generation prompt opens (or opens and closes): part of the turn."""
        match = _THINK_PREFIX.search(self._next_text)
        return match.group() if match else ""

    def samples(self, trajectory_id: str, group_id: str) -> tuple[TrainingSample, ...]:
        """One sample per stretch of unedited history. The mask is True exactly on sampled ids.

        What stands after the last sampled token is left out: nothing is learned from it.
        """
        return tuple(
            TrainingSample(
                tuple(part.ids[: part.committed]),
                tuple(part.mask[: part.committed]),
                tuple(part.logprobs[: part.committed]),
                trajectory_id,
                tuple(part.turn_ids[: part.committed]),
                group_id,
                tuple(part.images),
            )
            for part in self._segments
            if any(part.mask)
        )

    # -- writing ------------------------------------------------------------------------------------------

    def add_turn(self, generation: Generation, sampling: Sampling, *, text: str | None = None) -> Message:
        """Append what the policy sampled, ids as they are, and read it as a message.

        `Message.raw` is the text as sampled, without the stop token. `text`, where an engine reports one of
        its own, must be what the ids spell. Raises `EngineError` for no ids or ids that do not match.
        """
        prompt = self.prompt_ids
        ids = generation.token_ids
        if not ids:
            raise EngineError("the engine returned no tokens; a turn has at least one (its stop token)")
        raw = self._renderer.decode(ids[:-1] if ids[-1] in self._renderer.stop_token_ids else ids)
        if text is not None and text not in (raw, self._renderer.decode(ids)):
            raise EngineError(f"the engine's text {text[:80]!r} is not what its ids spell: {raw[:80]!r}")
        self._turns.append(
            Turn(prompt, ids, generation.logprobs, sampling, generation.versions, generation.finish_reason)
        )
        return self._append_turn(ids, generation.logprobs, raw, trained=True)

    def add_own_text(self, text: str, ids: Sequence[int], message: Message, *, trained: bool) -> None:
        """Append a demonstrated assistant turn: its text as rendered and its ids, terminator included."""
        self._turns.append(Turn(self.prompt_ids, tuple(ids), (0.0,) * len(ids), Sampling(), (), "stop"))
        self._append_turn(ids, (0.0,) * len(ids), text, trained=trained, message=message)

    def _append_turn(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        raw: str,
        *,
        trained: bool,
        message: Message | None = None,
    ) -> Message:
        turn = len(self._turns) - 1
        parsed = self._renderer.read(raw, prefix=self.think_prefix)
        if message is None:
            calls = tuple(
                replace(call, id=f"call{turn % 1000:03d}{i % 100:02d}") for i, call in enumerate(parsed.calls)
            )
            message = Message("assistant", parsed.text, tool_calls=calls, reasoning=parsed.reasoning, raw=raw)
        segment = self._segments[-1]
        segment.append(ids, logprobs, turn, trained)
        segment.committed = len(segment.ids)
        self._last_message = len(self._messages)
        self._messages.append(message)
        self._last_index = len(self._dicts)
        self._dicts += self._renderer.chat_dicts([message])
        self._last_meaning, self._last_prefix = meaning(parsed), self.think_prefix
        self._prompt_text = self._next_text
        self._awaiting = False
        return message

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what the environment or the user said, then the generation prompt.

        Raises `TemplateError` when the template cannot render it, or edits history under
        `on_history_edit="error"`.
        """
        self._messages += messages
        dicts = self._renderer.chat_dicts(messages)
        self._dicts += dicts
        self.neutralised += self._renderer.control.count(str(dicts))
        text = self._render_prompt()
        segment = self._segments[-1]
        if segment.committed == 0:  # nothing sampled yet: it is still the opening prompt
            self._segments.pop()
            self._begin_segment(text)
        else:
            tail = self._tail(text)
            if tail is None:
                self._on_edit(text)
                self._begin_segment(text)
            else:
                segment.cut(segment.committed)
                self._append_context(tail, messages)
        self._next_text = text
        self._awaiting = True

    def rendered_with(self, message: Message) -> tuple[str, str]:
        """The template's text of the current prompt, and of the history with one more assistant message."""
        dicts = self._dicts + self._renderer.chat_dicts([message])
        return self._next_text, self._renderer.render(dicts, self._tools, generation_prompt=False)

    # -- the delta ----------------------------------------------------------------------------------------

    def _render(self, count: int, *, generation_prompt: bool) -> str:
        dicts = self._dicts[:count]
        return self._renderer.render(dicts, self._tools, generation_prompt=generation_prompt)

    def _render_prompt(self) -> str:
        """The next prompt. Calls that the template refuses (Llama: two at once) stay text."""
        try:
            return self._render(len(self._dicts), generation_prompt=True)
        except TemplateError:
            said = self._messages[self._last_message] if self._last_index >= 0 else None
            if said is None or "tool_calls" not in self._dicts[self._last_index]:
                raise
            self._dicts[self._last_index] = self._renderer.as_text(said)
            return self._render(len(self._dicts), generation_prompt=True)

    def _begin_segment(self, text: str) -> None:
        self._segments.append(_Segment())
        self._append_context(text, self._messages)

    def _append_context(self, text: str, messages: Sequence[Message]) -> None:
        """Text that the policy did not write: ids with mask False."""
        segment = self._segments[-1]
        control = self._renderer.control
        ids = control.encode(text, after=segment.ids[-1] if segment.ids else None)
        segment.append(ids, [0.0] * len(ids), -1, trained=False)
        segment.images += images_of(messages)

    def _tail(self, text: str) -> str | None:
        """What follows the ids of the last turn in the newly rendered `text`; None if history was edited."""
        if not text.startswith(self._prompt_text):
            return None
        rest = text[len(self._prompt_text) :]
        for own, after in self._candidates(rest):
            shown = self._renderer.control.reveal(own)
            if meaning(self._renderer.read(shown, prefix=self._last_prefix)) == self._last_meaning:
                return self._without_sampled_stop(after)
        return None

    def _candidates(self, rest: str) -> list[tuple[str, str]]:
        """(the assistant's own text, what follows it), by its terminator, else by the template's delta."""
        found = []
        stop = self._renderer.stop_pattern.search(rest)
        if stop is not None:
            found.append((rest[: stop.start()], rest[stop.start() :]))
        until = self._render(self._last_index + 1, generation_prompt=False)[len(self._prompt_text) :]
        if until and rest.startswith(until):
            own = until.removesuffix(self._renderer.end_text)
            found.append((own, rest[len(own) :]))
        return found

    def _without_sampled_stop(self, after: str) -> str:
        """The stop token is already among the sampled ids, if that is how the turn ended."""
        last = self._segments[-1].ids[self._segments[-1].committed - 1]
        return after.removeprefix(self._renderer.stop_text(last)) if after else after

    def _on_edit(self, text: str) -> None:
        self.history_edits += 1
        if self._renderer.on_history_edit == "split":
            return
        segment = self._segments[-1]
        old, new = segment.ids[: segment.committed], self._renderer.control.encode(text)
        at = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
        )
        decode = self._renderer.decode
        raise TemplateError(
            f"the chat template rewrites what was already said, so the conversation has no common prefix: "
            f"token {at} was {decode(old[at : at + 1])!r} (in {decode(old[max(0, at - 8) : at + 8])!r}) and "
            f"would become {decode(new[at : at + 1])!r} (in {decode(new[max(0, at - 8) : at + 8])!r}). "
            f'Use on_history_edit="split" to go on with a new sample, or a template that keeps its history.'
        )


def meaning(parsed: ParsedText) -> Meaning:
    """What a turn says, whatever its white space and JSON spelling."""
    calls = tuple(
        (call.name, dict(call.arguments)) if call.error is None else squash(call.raw) for call in parsed.calls
    )
    return squash(parsed.reasoning or ""), squash(parsed.text), calls


def squash(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())
