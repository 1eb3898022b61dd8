"""What a chat template can do, found out by rendering small probes instead of by knowing its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import jinja2

from stepladder.data.chat.control import Tokenizer
from stepladder.data.prefix import common_prefix
from stepladder.errors import TemplateError

ChatDict: TypeAlias = dict[str, Any]

# Letters only: no template trims, splits or escapes them, and no tokenizer knows them as one token.
_SYSTEM, _USER, _ANSWER, _SECOND, _THOUGHT = "Syqprobe", "Usqprobe", "Anqprobe", "Seqprobe", "Thqprobe"
_TOOL_NAME, _ARGUMENT, _RESULT = "toolqprobe", "argqprobe", "resqprobe"
PROBE_TOOL: ChatDict = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The answers of the probes.

    parts: content must be a list of parts (SmolVLM). system: a system message is rendered; if not, it is
    put in front of the first user message. reasoning: the template renders `reasoning_content`; if not,
    reasoning travels inside the content. tools: tools, calls and results are all rendered.
    json_arguments: arguments must be a JSON string. end_text: what follows an assistant's content before
    anything else; final_text: what follows it when it is the last message. lead: what the template puts
    between the generation prompt and the content (gpt-oss: "<|channel|>final<|message|>"). opening,
    closing: what it puts around reasoning that stands before the content.
    """

    parts: bool
    system: bool
    reasoning: bool
    tools: bool
    json_arguments: bool
    end_text: str
    final_text: str
    lead: str
    opening: str
    closing: str


def render(
    tokenizer: Tokenizer,
    messages: Sequence[ChatDict],
    tools: Sequence[ChatDict] = (),
    *,
    generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """The template's text. Raises `TemplateError` with the template's own words and the roles received."""
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, so messages cannot be rendered; use an instruct model, or "
            "set tokenizer.chat_template to a Jinja template"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **template_kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as problem:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise TemplateError(
            f"the chat template cannot render this conversation: {problem}. Roles received: {roles}."
            f"{_advice(str(problem), messages)}"
        ) from problem
    return str(text)


def _advice(problem: str, messages: Sequence[ChatDict]) -> str:
    roles = [message.get("role") for message in messages]
    if any(a == b == "user" for a, b in pairwise(roles)):
        return " Join neighbouring user messages into one."
    if roles and roles[0] == "assistant":
        return " Begin the conversation with a user message."
    if "system" in roles[1:]:
        return " Put the system message first, and only one."
    if "alternate" in problem:
        return " Let user and assistant messages alternate, user first."
    if "tool" in roles or any(message.get("tool_calls") for message in messages):
        return " For a template without tools use tool_format=PLAIN (stepladder.data.chat.tool_format)."
    return ""


def probe(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> Dialect:
    """Find the dialect of a tokenizer's chat template.

    Raises `TemplateError` when not even a user message comes out of it.
    """

    def shown(messages: list[ChatDict], tools: Sequence[ChatDict] = ()) -> str:
        return render(tokenizer, messages, tools, generation_prompt=False, template_kwargs=template_kwargs)

    def tried(messages: list[ChatDict], tools: Sequence[ChatDict] = ()) -> str:
        try:
            return shown(messages, tools)
        except TemplateError:
            return ""

    user: ChatDict = {"role": "user", "content": _USER}
    parts = _USER not in tried([user])
    wrap = as_parts if parts else (lambda text: text)
    user = {"role": "user", "content": wrap(_USER)}
    if _USER not in shown([user]):
        raise TemplateError(
            "the chat template drops the text of a user message, given as a string or as parts; "
            "fix the template: it must render message['content']"
        )
    answer: ChatDict = {"role": "assistant", "content": wrap(_ANSWER)}
    asked = render(tokenizer, [user], generation_prompt=True, template_kwargs=template_kwargs)
    answered = tried([user, answer])
    lead = answered[len(asked) :].partition(_ANSWER)[0] if answered.startswith(asked) else ""
    final = _after(answered, _ANSWER)
    going_on = tried([user, answer, {"role": "user", "content": wrap(_SECOND)}])
    end_text = final[: common_prefix(final, _after(going_on, _ANSWER))]
    thought = tried([user, answer | with_reasoning(_THOUGHT)])
    opening, closing = "", ""
    if _THOUGHT in thought and thought.startswith(asked):
        opening, _, rest = thought[len(asked) :].partition(_THOUGHT)
        closing = rest.partition(_ANSWER)[0]
    call_texts = [
        tried(_tool_probe(user, wrap, arguments), [PROBE_TOOL])
        for arguments in ({"x": _ARGUMENT}, f'{{"x": "{_ARGUMENT}"}}')
    ]
    known = [all(t in text for t in (_TOOL_NAME, _ARGUMENT, _RESULT)) for text in call_texts]
    return Dialect(
        parts=parts,
        system=_SYSTEM in tried([{"role": "system", "content": wrap(_SYSTEM)}, user]),
        reasoning=_THOUGHT in thought,
        tools=any(known) and _TOOL_NAME in tried([user], [PROBE_TOOL]),
        json_arguments=known[1] and not known[0],
        end_text=end_text,
        final_text=final,
        lead=lead,
        opening=opening,
        closing=closing,
    )


def shows_images(tokenizer: Tokenizer, role: str, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether an image in a message of `role` leaves a mark in the prompt that is not just a list's repr.

    Asked with a tool, because a template that writes tools into a message may keep its text only.
    """

    def shown(content: list[ChatDict]) -> str:
        user: ChatDict = {"role": "user", "content": as_parts(_SECOND)}
        held: ChatDict = {"role": role, "content": content}
        if role == "tool":
            messages = [
                *_tool_probe(user, as_parts, {"x": _ARGUMENT})[:2],
                held | {"tool_call_id": "call00000"},
            ]
        else:
            messages = {"system": [held, user], "user": [held]}.get(role, [user, held])
        try:
            return render(
                tokenizer, messages, [PROBE_TOOL], generation_prompt=False, template_kwargs=template_kwargs
            )
        except TemplateError:
            return ""

    text = as_parts(_USER)
    without, with_image = shown(text), shown([{"type": "image"}, *text])
    listed = re.search(r"""['"]type['"]\s*:\s*['"]image['"]""", with_image) is not None
    return _USER in with_image and with_image != without and not listed


def _tool_probe(user: ChatDict, wrap: Any, arguments: Any) -> list[ChatDict]:
    call = {"id": "call00000", "type": "function", "function": {"name": _TOOL_NAME, "arguments": arguments}}
    return [
        user,
        {"role": "assistant", "content": wrap(""), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": _TOOL_NAME, "content": wrap(_RESULT)},
    ]


def as_parts(text: str) -> list[ChatDict]:
    """Content as a list with one text part."""
    return [{"type": "text", "text": text}]


def with_reasoning(text: str) -> ChatDict:
    """The keys under which templates look for reasoning."""
    return {"reasoning_content": text, "thinking": text}


def _after(text: str, probe_text: str) -> str:
    _, found, rest = text.rpartition(probe_text)
    return rest if found else ""
