"""Messages and tools from JSON: the OpenAI chat format, ShareGPT turns, dialogues written into one string."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from stepladder.data.files.disk import loads, refuse
from stepladder.types import Content, ImagePart, Message, Role, TextPart, Tool, ToolCall

_ROLES = get_args(Role)
_SPEAKERS: dict[str, Role] = {
    **{role: role for role in _ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_DIALOGUE = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?")


def messages_from(value: Any, where: str) -> tuple[Message, ...]:
    """A list of messages, {"role", "content"} or ShareGPT's {"from", "value"}; or a JSON string of one.

    Raises `DataError` naming the message and the field.
    """
    return tuple(message for _, message in numbered_messages(value, where))


def numbered_messages(value: Any, where: str) -> list[tuple[int, Message]]:
    """The same with the place of each in the list: turns that belong together are joined."""
    if isinstance(value, str):  # some data sets keep the list as a string, for columns of one type
        value = loads(value, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        refuse(where, "must be a non-empty list of messages", value)
    found: list[tuple[int, Message]] = []
    for i, item in enumerate(value):
        message = _message(item, f"{where}[{i}]")
        calls_only = message.tool_calls and not message.content
        # ShareGPT puts what is said and each call into turns of their own; it is one assistant turn.
        if isinstance(item, Mapping) and "from" in item and calls_only and found:
            place, last = found[-1]
            if last.role == "assistant":
                found[-1] = (place, replace(last, tool_calls=(*last.tool_calls, *message.tool_calls)))
                continue
        found.append((i, message))
    return found


def is_messages(value: Any) -> bool:
    """Is this a list of messages, or a JSON string of one?"""
    if isinstance(value, str):
        return bool(re.match(r'\s*\[\s*\{\s*"(role|from|content|value)"', value)) or _holds_messages(value)
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(m, Mapping) and ("role" in m or "from" in m) for m in value)
    )


def _holds_messages(text: str) -> bool:
    """The same of a JSON string whose messages begin with other keys, such as an id."""
    if not re.match(r"\s*\[\s*\{", text):
        return False
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return False  # a text that begins like JSON
    pairs = (("role", "content"), ("from", "value"))
    return all(
        isinstance(m, Mapping)
        and any(isinstance(m.get(who), str) and m[who] in _SPEAKERS and said in m for who, said in pairs)
        for m in items
    )


def is_printed_list(text: str) -> bool:
    """Is this a list of messages with Python's quotes, as pandas writes a column of lists into CSV?"""
    return bool(re.match(r"\s*\[\s*\{\s*'(role|from|content|value)'\s*:", text))


def is_dialogue(text: str) -> bool:
    """Is this a dialogue of the form "\\n\\nHuman: ...\\n\\nAssistant: ..."?"""
    return bool(re.match(r"\s*Human:", text)) and "\n\nAssistant:" in text


def dialogue(text: str) -> tuple[Message, ...]:
    """The turns of an Anthropic-style dialogue string. Call `is_dialogue` first.

    >>> [m.content for m in dialogue("\\n\\nHuman: Hi\\n\\nAssistant: Ho")]
    ['Hi', 'Ho']
    """
    _, *pieces = _DIALOGUE.split(text)
    return tuple(
        Message("user" if speaker == "Human" else "assistant", said.strip())
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    )


def tools_from(value: Any, where: str) -> tuple[Tool, ...]:
    """A list of tools in the OpenAI form, or a JSON string of one; None and "" are no tools."""
    if isinstance(value, str):
        value = loads(value, where) if value.strip() else ()
    value = value if value is not None else ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        refuse(where, "must be a list", value)
    return tuple(_tool(t, f"{where}[{i}]") for i, t in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        refuse(where, 'must be an object such as {"role": "user", "content": "Hi"}', value)
    key, text = ("from", "value") if "from" in value else ("role", "content")
    speaker = value.get(key)
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = _SPEAKERS if key == "from" else _ROLES
        refuse(f"{where}.{key}", f"must be one of {', '.join(known)}", speaker)
    for mark in ("weight", "train"):
        if role == "assistant" and value.get(mark) is not None and not value[mark]:
            refuse(
                f"{where}.{mark}",
                "marks a turn as not to be learned from, which is not read; leave the mark out, or give the "
                "turns before the one to be learned as a prompt",
                value[mark],
            )
    if speaker in ("function_call", "tool_call"):
        return Message("assistant", "", _calls_in(value.get(text), f"{where}.{text}"))
    calls = value.get("tool_calls") or ()
    if isinstance(calls, str):
        calls = loads(calls, f"{where}.tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        refuse(f"{where}.tool_calls", "must be a list", calls)
    if not calls and value.get("function_call"):  # OpenAI's older spelling, one call a turn
        calls = [value["function_call"]]
    if value.get(text) is None and not calls:
        refuse(f"{where}.{text}", "is missing", None)
    reasoning = next((value[k] for k in ("reasoning_content", "reasoning") if value.get(k) is not None), None)
    for name in ("name", "tool_call_id"):
        if not isinstance(value.get(name), str | None):
            refuse(f"{where}.{name}", "must be a string", value.get(name))
    if not isinstance(reasoning, str | None):
        refuse(f"{where}.reasoning_content", "must be a string", reasoning)
    return Message(
        role,
        _content(value.get(text), f"{where}.{text}"),
        tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        value.get("tool_call_id"),
        value.get("name"),
        reasoning,
    )


def _calls_in(value: Any, where: str) -> tuple[ToolCall, ...]:
    """The call, or the list of calls, that a ShareGPT "function_call" turn holds as JSON."""
    parsed = loads(value, where) if isinstance(value, str) else value
    calls = parsed if isinstance(parsed, list) else [parsed]
    return tuple(_call(call, where) for call in calls)


def _content(value: Any, where: str) -> Content:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        refuse(where, "must be a string or a list of parts", value)
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(value))


def _part(value: Any, where: str) -> TextPart | ImagePart:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return TextPart(value["text"])
    if kind == "image_url":
        inner = value.get("image_url")
        url = inner.get("url") if isinstance(inner, Mapping) else inner
        if isinstance(url, str):
            return ImagePart(url)
    refuse(where, 'must be {"type": "text", "text": ...} or {"type": "image_url", ...}', value)


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse(where, 'must be {"function": {"name": ..., "arguments": {...}}}', value)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):  # as the OpenAI API writes them
        arguments = loads(arguments, f"{where}.arguments")
    if not isinstance(arguments, Mapping):
        refuse(f"{where}.arguments", "must be an object", arguments)
    return ToolCall(function["name"], arguments, id=str(value.get("id") or ""))


def _tool(value: Any, where: str) -> Tool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        refuse(where, 'must be {"type": "function", "function": {"name": ...}}', value)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if isinstance(parameters, str):
        parameters = loads(parameters, f"{where}.parameters")
    if not isinstance(parameters, Mapping):
        refuse(f"{where}.parameters", 'must be an object such as {"type": "object", ...}', parameters)
    return Tool(function["name"], str(function.get("description") or ""), parameters)
