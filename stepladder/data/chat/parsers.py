"""Reading what the model wrote: reasoning, tool calls, and the text that is left.

A parser never raises and never runs anything. What looks like a call but cannot be read becomes a
`ToolCall` whose `error` says why; the model is shown that sentence and nothing is executed. A call inside
a thinking block is a thought, not a call. Text without a call is a final answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepladder.types import ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_DEPTH = 64  # of a call's arguments: everything that reads them later is recursive
_SHAPE = '{"name": "tool", "arguments": {"x": 1}}'


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What one assistant turn said.

    >>> parse_hermes('Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls[0].name
    'add'
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


Parser: TypeAlias = Callable[[str], ParsedText]


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning, rest). An unclosed block is all reasoning; a lone close was opened by the prompt."""
    head, opened, tail = text.partition(THINK_OPEN)
    if opened and not head.strip():
        reasoning, closed, rest = tail.partition(THINK_CLOSE)
        return reasoning.strip(), rest if closed else ""
    reasoning, closed, rest = text.partition(THINK_CLOSE)
    if closed and THINK_OPEN not in reasoning:
        return reasoning.strip(), rest
    return None, text


def parse_text(text: str) -> ParsedText:
    """Text and reasoning only: for a model without tools."""
    reasoning, rest = split_reasoning(text)
    return ParsedText(rest.strip(), (), reasoning)


def parse_hermes(text: str) -> ParsedText:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen 2.5/3)."""
    return _parse_tagged(text, "<tool_call>", "</tool_call>", read_json_call)


def parse_function_xml(text: str) -> ParsedText:
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>` (Qwen 3.5 and later).

    A value that is JSON in its shortest usual spelling (`5`, `true`, `[1, 2]`) is decoded, everything else
    is a string: the format itself does not tell `5` from `"5"`.
    """
    return _parse_tagged(text, "<tool_call>", "</tool_call>", _read_function_xml)


def parse_llama_json(text: str) -> ParsedText:
    """`{"name": ..., "parameters": {...}}` as the whole answer, after an optional `<|python_tag|>` (Llama 3).

    Several calls are separated by `;` or line breaks. An answer that begins with a brace is an attempt at a
    call, so that a broken one is reported to the model instead of ending the episode.
    """
    reasoning, rest = split_reasoning(text)
    before, tag, tail = rest.partition("<|python_tag|>")
    body = tail if tag else rest
    if not tag and not body.lstrip().startswith("{"):
        return ParsedText(rest.strip(), (), reasoning)
    calls: list[ToolCall] = []
    body = body.strip()
    while body:
        value, end, problem = _decode(body)
        if problem is not None:
            calls.append(_broken(problem, body))
            break
        calls.append(_call_from(value, body[:end]))
        body = body[end:].lstrip(" \t\r\n;")
    if not calls:
        calls.append(_broken("nothing follows <|python_tag|>", tag))
    return ParsedText(before.strip() if tag else "", tuple(calls), reasoning)


_FENCE = re.compile(r"```(tool_call|json)[ \t]*\r?\n(.*?)(```|\Z)", re.DOTALL)


def parse_fenced(text: str) -> ParsedText:
    """A fenced block marked `tool_call`, holding one JSON object.

    A block marked `json` counts as a call only if it reads as one (a name and arguments): an answer may
    well contain JSON.
    """
    reasoning, rest = split_reasoning(text)
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        kind, body, close = match.groups()
        call = read_json_call(body)
        if kind == "json" and (call.error is not None or not re.search(r'"(arguments|parameters)"', body)):
            return match.group(0)
        if not close:
            call = _broken("it was cut off before its closing ```", match.group(0))
        calls.append(call)
        return ""

    return ParsedText(_FENCE.sub(take, rest).strip(), tuple(calls), reasoning)


def read_json_call(body: str) -> ToolCall:
    """One call from the JSON text of one object.

    >>> read_json_call('[]').error
    'the call must be a JSON object such as {"name": "tool", "arguments": {"x": 1}}, not a list'
    """
    value, end, problem = _decode(body)
    if problem is None and body[end:].strip():
        problem = f"unexpected text after the JSON object: {body[end:].strip()[:40]!r}"
    return _call_from(value, body) if problem is None else _broken(problem, body)


def read_arguments(text: str) -> tuple[dict[str, Any], str | None]:
    """(arguments, problem): the JSON text of a call's arguments, as chat endpoints send it.

    >>> read_arguments('{"x": 1}'), read_arguments("[]")[1]
    (({'x': 1}, None), 'arguments must be a JSON object such as {"x": 1}, not list')
    """
    value, end, problem = _decode(text)
    if problem is None and text[end:].strip():
        problem = f"unexpected text after the JSON object: {text[end:].strip()[:40]!r}"
    if problem is None and not isinstance(value, dict):
        return {}, f'arguments must be a JSON object such as {{"x": 1}}, not {type(value).__name__}'
    return (value, None) if problem is None else ({}, f"arguments cannot be read: {problem}")


def _parse_tagged(text: str, opening: str, closing: str, read: Callable[[str], ToolCall]) -> ParsedText:
    reasoning, rest = split_reasoning(text)
    calls: list[ToolCall] = []
    kept: list[str] = []
    while True:
        start, stray = rest.find(opening), rest.find(closing)
        if stray >= 0 and (start < 0 or stray < start):
            calls.append(_broken(f"{closing} without {opening} before it", rest[: stray + len(closing)]))
            rest = rest[stray + len(closing) :]
            continue
        if start < 0:
            kept.append(rest)
            break
        kept.append(rest[:start])
        body = rest[start + len(opening) :]
        stop = _closing_index(body, closing)
        if stop < 0:
            calls.append(_broken(f"it was cut off before {closing}", rest[start:]))
            break
        calls.append(read(body[:stop]))
        rest = body[stop + len(closing) :]
    return ParsedText("".join(kept).strip(), tuple(calls), reasoning)


def _closing_index(body: str, closing: str) -> int:
    """Where the call's body ends; a closing tag inside a JSON string does not count."""
    _, end, problem = _decode(body)
    return body.find(closing, end if problem is None else 0)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _decode(body: str) -> tuple[Any, int, str | None]:
    """(value, index after it, problem): the first JSON value of the text."""
    start = len(body) - len(body.lstrip())
    try:
        value, end = _DECODER.raw_decode(body, start)
        # A lone surrogate (\ud800) is valid JSON and no valid text: no tokenizer and no file takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        return None, start, f"it is not valid JSON ({str(problem)[:80]})"
    if _deeper_than(value, MAX_DEPTH):
        return None, start, f"its lists and objects are nested more than {MAX_DEPTH} deep"
    return value, end, None


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and objects lie in each other more than `limit` deep; without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        inner = [v for item in level for v in (item.values() if isinstance(item, dict) else item)]
        level = [v for v in inner if isinstance(v, dict | list)]
    return bool(level)


def _call_from(value: Any, raw: str) -> ToolCall:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a bare value")
        return _broken(f"the call must be a JSON object such as {_SHAPE}, not {kind}", raw)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _broken(f'the call has no "name"; write it as {_SHAPE}', raw)
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        problem = f'"arguments" must be a JSON object such as {{"x": 1}}, not {type(arguments).__name__}'
        return ToolCall(name, error=problem, raw=raw)
    return ToolCall(name, arguments, raw=raw)


def _broken(problem: str, raw: str) -> ToolCall:
    return ToolCall("", error=problem, raw=raw)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_function_xml(body: str) -> ToolCall:
    match = _FUNCTION.match(body)
    if match is None:
        return _broken("a call is written <function=name> ... </function> inside the tags", body)
    name, inside = match.group(1).strip(), match.group(2)
    arguments: dict[str, Any] = {}
    while inside.strip():
        parameter = _PARAMETER.match(inside)
        if parameter is None:
            problem = "a parameter is written <parameter=name>value</parameter>"
            return ToolCall(name, error=problem, raw=body)
        arguments[parameter.group(1).strip()] = _plain_or_json(parameter.group(2))
        inside = inside[parameter.end() :]
    return ToolCall(name, arguments, raw=body)


def _plain_or_json(text: str) -> Any:
    value, end, problem = _decode(text)
    if problem is not None or isinstance(value, str) or text != text[:end]:
        return text
    return value if json.dumps(value, ensure_ascii=False) == text else text
