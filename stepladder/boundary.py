"""What foreign code gave us, turned into our nouns, or refused with a message that names where it came from.

`where` is always the thing the user wrote, such as "reset() of Shop"; a wrong type is a TypeError (the code
is wrong), a wrong dataset row a DataError, a wrong reward a RewardError.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from stepladder.errors import DataError, RewardError
from stepladder.types import Content, ImagePart, Message, Role, Score, Task, TextPart, ToolCall

_ROLES = get_args(Role)


def shown(value: Any, limit: int = 80) -> str:
    """`repr` of a value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def to_message(value: Any, *, where: str, role: Role = "user") -> Message:
    """A Message from a Message, a string (said by `role`) or an OpenAI chat dictionary."""
    if isinstance(value, Message):
        return value
    if isinstance(value, str):
        return Message(role, value)
    if isinstance(value, Mapping):
        return _message_from_dict(value, where)
    raise TypeError(
        f"{where} gave {shown(value)} as a message; give a str, a Message, or a dict such as "
        "{'role': 'user', 'content': 'Hello'}"
    )


def to_messages(value: Any, *, where: str, role: Role = "user") -> tuple[Message, ...]:
    """One message or several, as `to_message` takes them."""
    if isinstance(value, (str, Message, Mapping)):
        return (to_message(value, where=where, role=role),)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return tuple(to_message(item, where=where, role=role) for item in value)
    raise TypeError(
        f"{where} gave {shown(value)}; give a str, a Message, a dict such as "
        "{'role': 'user', 'content': 'Hello'}, or a list of these"
    )


def to_conversations(value: Any, *, count: int, where: str) -> list[tuple[Message, ...]]:
    """`count` conversations, each a list of what `to_message` takes that ends with the assistant's message.

    Raises TypeError for anything else, DataError for another number of conversations.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{where} is async, but is asked outside an event loop; make it a plain function")
        raise TypeError(
            f"{where} returned {shown(value)}; return a list of conversations (lists of messages)"
        )
    out = []
    for i, item in enumerate(value):
        if isinstance(item, (str, Message, Mapping)):
            raise TypeError(f"{where}: conversation {i} is one message; give a list of them: {shown(item)}")
        messages = to_messages(item, where=f"{where}, conversation {i},")
        if not messages or messages[-1].role != "assistant":
            last = f"ends with a message from {messages[-1].role!r}" if messages else "is empty"
            raise TypeError(f"{where}: conversation {i} {last}; end it with the assistant's message")
        out.append(messages)
    if len(out) != count:
        asked = f"{count} {'was' if count == 1 else 'were'} asked for"
        raise DataError(f"{where} returned {len(out)} conversations, {asked}; return as many as `count` says")
    return out


def _message_from_dict(value: Mapping[str, Any], where: str) -> Message:
    role = value.get("role")
    if role not in _ROLES:
        raise TypeError(f"{where} gave a message with role {role!r}; the roles are {', '.join(_ROLES)}")
    content = value.get("content")
    return Message(
        role=cast(Role, role),
        content=_content(content if content is not None else "", where),
        tool_calls=tuple(_tool_call(call, where) for call in value.get("tool_calls") or ()),
        tool_call_id=value.get("tool_call_id"),
        name=value.get("name"),
        reasoning=value.get("reasoning_content", value.get("reasoning")),
    )


def _content(value: Any, where: str) -> Content:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{where} gave {shown(value)} as message content; give a str or a list of parts")
    return tuple(_part(part, where) for part in value)


def _part(part: Any, where: str) -> TextPart | ImagePart:
    if isinstance(part, (TextPart, ImagePart)):
        return part
    if isinstance(part, str):
        return TextPart(part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return TextPart(part["text"])
    if isinstance(part, Mapping) and part.get("type") in ("image_url", "image"):
        source = part.get("image_url", part.get("image", part.get("url")))
        url = source.get("url") if isinstance(source, Mapping) else source
        if isinstance(url, str):
            return ImagePart(url)
    raise TypeError(
        f"{where} gave {shown(part)} as a part of a message; give {{'type': 'text', 'text': ...}} or "
        "{'type': 'image_url', 'image_url': {'url': ...}}"
    )


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            f"{where} gave {shown(call)} as a tool call; give {{'type': 'function', 'function': "
            "{'name': ..., 'arguments': {...}}}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI sends arguments as JSON text
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise TypeError(f"{where} gave arguments that are no JSON: {shown(arguments)}") from error
    if not isinstance(arguments, Mapping):
        raise TypeError(f"{where} gave {shown(arguments)} as tool-call arguments; give a dict")
    return ToolCall(function["name"], dict(arguments), id=str(call.get("id") or ""))


LARGEST_REWARD = 1e15


def to_number(value: Any, *, where: str) -> float | None:
    """A reward as a float; None stays None ("could not be scored"). Raises RewardError for the rest.

    Numbers of other libraries (numpy, torch) are taken where they hold a single one.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):  # bool is Real: True counts as 1.0
        raise RewardError(f"{where} returned {shown(value)}; return a number, a Score, or None")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"{where} returned {number}; return a finite number, or None for 'could not be scored'"
        )
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"{where} returned {number:g}; a reward may be {LARGEST_REWARD:g} at most, for its square must "
            "be a float32: scale rewards to about 1"
        )
    return number


def to_score(value: Any, *, where: str, turns: bool = False) -> Score:
    """A Score from a Score, a number or None; with `turns` also from one number for each turn (a process
    reward: their sum).

    Raises RewardError for anything else, NaN included.
    """
    if turns and isinstance(value, (list, tuple)) and value:
        found = [to_number(v, where=f"{where}, turn {k},") for k, v in enumerate(value)]
        each = tuple(v for v in found if v is not None)
        if len(each) < len(found):
            return Score(None)
        return Score(sum(each), turns=each)
    if not isinstance(value, Score):
        return Score(to_number(value, where=where))
    parts = {name: to_number(part, where=f"{where}, part {name!r},") for name, part in value.parts.items()}
    return Score(to_number(value.value, where=where), parts, value.explanation, value.turns)


_TASK_FIELDS = ("id", "split", "domain", "seed", "prompt", "messages", "reference", "data")


def to_task(value: Any, *, split: str, index: int, where: str) -> Task:
    """A Task from a Task, a prompt string, or a dict.

    The dict: "prompt" (a str or messages; "messages" means the same), "reference", and optionally "id",
    "domain", "seed", "data"; every other key is kept in `Task.data`. Raises DataError.

    >>> to_task({"prompt": "2 + 3?", "reference": "5", "level": 1}, split="train", index=0, where="").data
    {'level': 1}
    """
    if isinstance(value, Task):
        return value if value.split == split else replace(value, split=split)
    if isinstance(value, str):
        value = {"prompt": value}
    row = f"task {index} of split {split!r} from {where}"
    if not isinstance(value, Mapping):
        raise DataError(f"{row} is {shown(value)}; give a Task, a prompt str, or a dict with 'prompt'")
    prompt = value.get("prompt", value.get("messages"))
    try:
        messages = to_messages(prompt, where=row) if prompt is not None else ()
    except TypeError as error:
        raise DataError(str(error)) from error
    rest = {key: item for key, item in value.items() if key not in _TASK_FIELDS}
    return Task(
        id=str(value.get("id", f"{split}/{index}")),
        split=split,
        domain=str(value.get("domain", "default")),
        messages=messages,
        reference=value.get("reference"),
        seed=int(value.get("seed", index)),
        data={**(value.get("data") or {}), **rest},
    )


def to_tasks(values: Any, *, split: str, where: str) -> tuple[Task, ...]:
    """All tasks of a split, from any finite iterable of what `to_task` takes."""
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise DataError(f"{where} gave {shown(values)} as the tasks of split {split!r}; give a list of tasks")
    return tuple(to_task(value, split=split, index=i, where=where) for i, value in enumerate(values))


def require_index(count: int, split: str, i: int) -> None:
    """What `get(split, i)` of a world of numbered tasks begins with. Raises DataError."""
    if not 0 <= i < count:
        raise DataError(f"split {split!r} has the tasks 0 to {count - 1}; got {i}")
