"""One model's tokenizer, chat template and tool format: messages to text, text to ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stepladder.data.chat import dialect as dialects
from stepladder.data.chat.control import ControlText, Tokenizer
from stepladder.data.chat.dialect import ChatDict
from stepladder.data.chat.parsers import ParsedText, split_reasoning
from stepladder.data.chat.plain_text import raw_prompt, whole_text
from stepladder.data.chat.spelling import Spelling
from stepladder.data.chat.tool_format import ToolFormat, detect_tool_format, fitted
from stepladder.data.encoder import Side
from stepladder.errors import DataError, TemplateError
from stepladder.types import ImagePart, Message, TextPart, Tool, ToolCall

HistoryEdit = Literal["split", "error"]


class ChatTemplate:
    """Wraps a fast transformers tokenizer. Thread-safe as far as the tokenizer is.

    `tool_format=None` detects it. A format that wraps the template sets `tokenizer.chat_template`, so that
    `tokenizer.save_pretrained` carries it. `extra_stop_ids`: the end-of-sequence ids of the model's
    generation config. `template_kwargs` reach the template (`enable_thinking=False`).
    `on_history_edit`: what a conversation does when the template rewrites what was already said: "split"
    starts a new sample with the history as prompt, "error" raises `TemplateError`.

    Raises `TemplateError` when there is no usable chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: ToolFormat | None = None,
        *,
        extra_stop_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        on_history_edit: HistoryEdit = "split",
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.on_history_edit = on_history_edit
        self.tool_format = (
            detect_tool_format(tokenizer) if tool_format is None else fitted(tool_format, tokenizer)
        )
        if self.tool_format.chat_template is not None:
            tokenizer.chat_template = self.tool_format.chat_template
        self.control = ControlText(tokenizer)
        self.dialect = dialects.probe(tokenizer, self.template_kwargs)
        self._shows_images: dict[str, bool] = {}  # by role, asked when the first one comes
        self.stop_token_ids = self._find_stops(extra_stop_ids)
        self.control.never_structural(self.stop_token_ids)
        self._stop_texts = {i: text for text, i in self.control.ids.items() if i in self.stop_token_ids}
        self.stop_pattern = re.compile("|".join(map(re.escape, self._stop_texts.values())) or r"(?!)")
        # The common text after an assistant's content may end inside the next control token: cut it there.
        self.end_text = re.sub(r"[<\[][^>\]]*\Z", "", self.dialect.end_text)
        self._spelling = Spelling.of(self.dialect, self.control, self.stop_pattern)

    def _find_stops(self, extra: Sequence[int]) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's, the generation config's, the template's own terminator."""
        eos = self.tokenizer.eos_token_id
        known = {*extra, *(eos if isinstance(eos, list) else [] if eos is None else [eos])}
        known |= {self.control.ids[t] for t in self.tool_format.stops if t in self.control.ids}
        # An assistant's content is followed by the same text in the middle of a conversation and at its end,
        # except for an end-of-sequence mark (Phi) that belongs to the end only.
        for text in (self.dialect.end_text, self.dialect.final_text):
            ends = self.control.find(text)
            if ends:
                known |= {*ends} if len(ends) == 1 else set() if known & set(ends) else {ends[0]}
                break
        return tuple(sorted(known))

    def frame(self, prompt: Side, tools: Sequence[Tool], prompt_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the lengths of a prompt's frame, see `data.encoder.Encoder`."""
        head = int(prompt_ids[0] == self.tokenizer.bos_token_id)
        if isinstance(prompt, str):
            return head, 0
        dicts, shown = self.chat_dicts(prompt, first=True), self.tool_dicts(tools)
        before = self.render(dicts, shown, generation_prompt=False)
        whole = self.render(dicts, shown, generation_prompt=True)
        if not whole.startswith(before):
            return None
        for after in (None, *self.stop_token_ids):
            opening = tuple(self.control.encode(whole[len(before) :], after=after))
            if opening and tuple(prompt_ids[-len(opening) :]) == opening:
                return head, len(opening)
        return None

    def shield(self, text: str) -> str:
        """Return a part of an answer as `answered` shields it."""
        return self.control.shield(text, structural=True)

    def encode(self, shielded: str, *, after: int | None = None) -> list[int]:
        """Return the ids of a shielded text that follows the token `after`."""
        return self.control.encode(shielded, after=after)

    def whole_text(self, text: str) -> list[int]:
        """Return the ids of a text that no template wraps, with the end-of-sequence token."""
        return whole_text(self.tokenizer, self.control, text)

    def require_tools(self, tools: Sequence[Tool]) -> None:
        """Raise `TemplateError` where the template has no way to show the tools."""
        if tools and not self.dialect.tools:
            raise TemplateError(
                f"this chat template shows no tools, but {len(tools)} were given ({tools[0].name!r} first); "
                f"use tool_format=PLAIN to have them written into the system message, or an environment "
                f"without tools"
            )

    def raw_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt without a chat template: one BOS where the tokenizer adds one, markers as text."""
        return raw_prompt(self.tokenizer, self.control, text)

    def render(self, dicts: Sequence[ChatDict], tools: Sequence[ChatDict], *, generation_prompt: bool) -> str:
        """The template's text of shielded messages."""
        return dialects.render(
            self.tokenizer,
            dicts,
            tools,
            generation_prompt=generation_prompt,
            template_kwargs=self.template_kwargs,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out, nothing tidied."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def read(self, text: str, *, prefix: str = "") -> ParsedText:
        """What an assistant turn says. `prefix` is the thinking tag that its generation prompt opened."""
        return self.tool_format.parse(prefix + self._spelling.plain(text))

    def stop_text(self, token_id: int) -> str:
        """How a stop token is written; an empty text for any other token."""
        return self._stop_texts.get(token_id, "")

    def terminator_after(self, message: Message) -> str:
        """The terminator of a turn for templates that write none (GLM): the header a model stops at."""
        end: ChatDict = {"role": "tool" if message.tool_calls else "user", "content": "x"}
        if self.dialect.parts:
            end["content"] = dialects.as_parts("x")
        dicts = [*self.chat_dicts([Message("user", "x"), Message("assistant", "x")]), end]
        shown = self.render(dicts[:2], (), generation_prompt=False)
        both = self.render(dicts, (), generation_prompt=False)
        following = self.control.find(both[len(shown) :]) if both.startswith(shown) else []
        if following and following[0] in self.stop_token_ids:
            return self.stop_text(following[0])
        return str(self.tokenizer.eos_token or "")

    def tool_dicts(self, tools: Sequence[Tool]) -> list[ChatDict]:
        """Tools as templates expect them, shielded."""
        return [self._shield_values(tool.to_dict()) for tool in tools]

    def chat_dicts(self, messages: Sequence[Message], *, first: bool = False) -> list[ChatDict]:
        """Messages as the template expects them, shielded.

        `first=True`: they open the conversation, so that a system message of a template without a system
        role is put in front of the first user message.
        """
        messages = list(messages)
        for message in messages:
            self._refuse_lost_images(message)
        if first and not self.dialect.system and messages and messages[0].role == "system":
            messages = _system_into_user(messages)
        return [self._assistant(m) if m.role == "assistant" else self._other(m) for m in messages]

    def _refuse_lost_images(self, message: Message) -> None:
        """A template for text would write the parts out as a Python list, or leave the image out."""
        image = next(iter(images_of([message])), None)
        if image is None:
            return
        role = message.role
        if role not in self._shows_images:
            self._shows_images[role] = dialects.shows_images(self.tokenizer, role, self.template_kwargs)
        if not self._shows_images[role]:
            raise TemplateError(
                f"a message of role {role!r} holds an image ({image.url[:80]}), but the chat template shows "
                "no images there; use a model whose template does, or describe the image as text"
            )

    def _other(self, message: Message) -> ChatDict:
        out: ChatDict = {"role": message.role, "content": self._content(message, structural=False)}
        for key in ("name", "tool_call_id"):
            value = getattr(message, key)
            if value is not None:
                out[key] = self.control.shield(value)
        return out

    def _content(self, message: Message, *, structural: bool) -> Any:
        def shield(text: str) -> str:
            return self.control.shield(text, structural=structural)

        if isinstance(message.content, str):
            text = shield(message.content)
            return dialects.as_parts(text) if self.dialect.parts else text
        if not self.dialect.parts and not any(isinstance(p, ImagePart) for p in message.content):
            return shield(message.text)
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": shield(part.text)}
            for part in message.content
        ]

    def _assistant(self, message: Message) -> ChatDict:
        """An assistant message of the history. One that cannot be rendered from its parts is given as text.

        Its sampled ids stay what they are; this only tells the template what was said.
        """
        broken = any(call.error is not None for call in message.tool_calls)
        if broken and message.raw is not None:
            return self.as_text(message)
        if message.raw is not None and not message.tool_calls and message.reasoning is None:
            return self.as_text(message)
        if not isinstance(message.content, str):
            out: ChatDict = {"role": "assistant", "content": self._content(message, structural=True)}
            return out | self._calls(message.tool_calls)
        return self._assistant_dict(message.content, message.reasoning, message.tool_calls)

    def as_text(self, message: Message) -> ChatDict:
        """An assistant message with its calls left in its text."""
        if message.raw is None:
            written = [self.tool_format.write(call) for call in message.tool_calls]
            return self._assistant_dict("\n".join([message.text, *written]).strip(), message.reasoning, ())
        text = self._spelling.plain(message.raw)
        if message.reasoning is not None:
            text = split_reasoning(text if "</think>" in text else "<think>" + text)[1].lstrip("\n")
        return self._assistant_dict(text, message.reasoning, ())

    def _assistant_dict(self, text: str, reasoning: str | None, calls: Sequence[ToolCall]) -> ChatDict:
        out: ChatDict = {"role": "assistant"}
        if reasoning is not None and self.dialect.reasoning:
            out |= dialects.with_reasoning(self.control.shield(reasoning, structural=True))
        elif reasoning is not None:
            text = f"<think>\n{reasoning}\n</think>\n\n{text}"
        text = self.control.shield(text, structural=True)
        out["content"] = dialects.as_parts(text) if self.dialect.parts else text
        return out | self._calls(calls)

    def _calls(self, calls: Sequence[ToolCall]) -> ChatDict:
        if not calls:
            return {}
        found = []
        for call in Message("assistant", tool_calls=tuple(calls)).to_dict()["tool_calls"]:
            call = self._shield_values(call)
            if self.dialect.json_arguments:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            found.append(call)
        return {"tool_calls": found}

    def _shield_values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.control.shield(value)
        if isinstance(value, Mapping):
            return {self.control.shield(str(k)): self._shield_values(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield_values(item) for item in value]
        return value


def _system_into_user(messages: list[Message]) -> list[Message]:
    if len(messages) < 2 or messages[1].role != "user":
        raise DataError(
            "this model's chat template has no system role, so the system message is put in front of the "
            "first user message; let a user message follow it"
        )
    system, user, *rest = messages
    if isinstance(user.content, str):
        content: Any = f"{system.text}\n\n{user.content}"
    else:
        content = (TextPart(f"{system.text}\n\n"), *user.content)
    return [Message("user", content, name=user.name), *rest]


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """The images of messages, in order."""
    return [
        part
        for message in messages
        if not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, ImagePart)
    ]
