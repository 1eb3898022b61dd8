"""Conversations from JSON and JSON Lines files, for supervised fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from stepladder.data.records import Demonstration
from stepladder.errors import DataError
from stepladder.types import Content, ImagePart, Message, Role, TextPart, Tool, ToolCall

_ROLES = get_args(Role)


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    """Rows {"messages": [...], "tools": [...]} in the OpenAI chat format, from .jsonl or .json.

    A byte-order mark, Windows line ends and blank lines are accepted. Raises `DataError` naming the row and
    the field that is wrong, and for a file without rows.
    """
    path = Path(path)
    rows = [demonstration_from(row, where) for row, where in _rows(path)]
    if not rows:
        raise DataError(f'{path} holds no rows; give one JSON object per line, {{"messages": [...]}}')
    return rows


def demonstration_from(row: Any, where: str = "row") -> Demonstration:
    """A conversation from one JSON object; `where` names it in errors."""
    if not isinstance(row, Mapping):
        _refuse(where, "must be a JSON object with a list of messages", row)
    messages = row.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        _refuse(f'{where}, field "messages"', "must be a non-empty list", messages)
    tools = row.get("tools") or ()
    if isinstance(tools, str):  # some data sets keep the list as a string, for columns of one type
        tools = _loads(tools, f'{where}, field "tools"')
    if not isinstance(tools, Sequence):
        _refuse(f'{where}, field "tools"', "must be a list", tools)
    return Demonstration(
        tuple(_message(m, f'{where}, field "messages[{i}]"') for i, m in enumerate(messages)),
        tuple(_tool(t, f'{where}, field "tools[{i}]"') for i, t in enumerate(tools)),
    )


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is not UTF-8 text ({problem}); save it as UTF-8") from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    if path.suffix == ".json":
        whole = _loads(text, str(path)) if text.strip() else []
        if not isinstance(whole, list):
            _refuse(str(path), "must be a JSON list of rows", whole)
        for index, row in enumerate(whole):
            yield row, f"{path}, row {index}"
        return
    # Not splitlines(): it also breaks at U+2028, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _loads(line, f"{path}, line {number}"), f"{path}, line {number}"


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not valid JSON ({str(problem)[:100]})") from problem


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        _refuse(where, 'must be an object such as {"role": "user", "content": "Hi"}', value)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}", role)
    calls = value.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        _refuse(f"{where}.tool_calls", "must be a list", calls)
    if value.get("content") is None and not calls:
        _refuse(f"{where}.content", "is missing", None)
    reasoning = next((value[k] for k in ("reasoning_content", "reasoning") if value.get(k) is not None), None)
    for key in ("name", "tool_call_id"):
        if not isinstance(value.get(key), str | None):
            _refuse(f"{where}.{key}", "must be a string", value.get(key))
    if not isinstance(reasoning, str | None):
        _refuse(f"{where}.reasoning_content", "must be a string", reasoning)
    return Message(
        cast(Role, role),
        _content(value.get("content"), f"{where}.content"),
        tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        value.get("tool_call_id"),
        value.get("name"),
        reasoning,
    )


def _content(value: Any, where: str) -> Content:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        _refuse(where, "must be a string or a list of parts", value)
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
    _refuse(where, 'must be {"type": "text", "text": ...} or {"type": "image_url", ...}', value)


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(where, 'must be {"function": {"name": ..., "arguments": {...}}}', value)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):  # as the OpenAI API writes them
        arguments = _loads(arguments, f"{where}.arguments")
    if not isinstance(arguments, Mapping):
        _refuse(f"{where}.arguments", "must be an object", arguments)
    return ToolCall(function["name"], arguments, id=str(value.get("id") or ""))


def _tool(value: Any, where: str) -> Tool:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(where, 'must be {"type": "function", "function": {"name": ...}}', value)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], str(function.get("description") or ""), parameters)


def _refuse(where: str, must: str, value: Any) -> NoReturn:
    raise DataError(f"{where}: {must}; got {str(value)[:80]!r}")
