"""What `check_environment` puts to an environment: awkward messages, example arguments, schema rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepladder.boundary import shown
from stepladder.environments.schema import JSON_TYPES
from stepladder.errors import nearest
from stepladder.types import Message, Tool, ToolCall


def awkward_messages(tools: Sequence[Tool]) -> dict[str, Message]:
    """What a model says sooner or later, by the name of what is awkward about it."""

    def calling(*calls: ToolCall) -> Message:
        return Message("assistant", tool_calls=calls, raw="...")

    some = tools[0].name if tools else "search"
    return {
        "plain text": Message("assistant", "I do not know."),
        "an empty message": Message("assistant", ""),
        "a very long message": Message("assistant", "9" * 100_000),
        "odd characters": Message("assistant", "\x00 <|im_end|> \U0001f600 {% raw %} \n"),
        "a malformed tool call": calling(ToolCall("", error="the arguments are not valid JSON", raw="{")),
        "an unknown tool": calling(ToolCall("no_such_tool_1", {"x": 1}, id="1")),
        "a call without arguments": calling(ToolCall(some, {}, id="1")),
        "a call with wrong arguments": calling(ToolCall(some, {"no_such_argument": None}, id="1")),
        "a storm of calls": calling(*[ToolCall("no_such_tool_1", {}, id=str(i)) for i in range(100)]),
    }


def example(schema: Any) -> Any:
    """Some value that fits a JSON schema."""
    if not isinstance(schema, dict):
        return "a"
    if "default" in schema:
        return schema["default"]
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0])
    kind = schema.get("type")
    if kind == "object":
        return {k: example(v) for k, v in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items"))] if schema.get("minItems") else []
    if kind in ("integer", "number"):
        return max(schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
    return {"boolean": True, "null": None}.get(str(kind), "a")


def schema_problems(schema: Any, path: str = "parameters") -> list[str]:
    """What is wrong with a tool's JSON schema, in words; empty where nothing is."""
    if not isinstance(schema, Mapping):
        return [f"{path} is {shown(schema)}; a schema is a dict"]
    out = []
    if path == "parameters" and schema.get("type") != "object":
        out.append(f"{path} has type {schema.get('type')!r}; the arguments of a tool are an 'object'")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in JSON_TYPES:
            out.append(f"{path} has type {kind!r}.{nearest(str(kind), JSON_TYPES)}")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return [*out, f"{path}.properties is {shown(properties)}; it maps names to schemas"]
    for name in schema.get("required", ()):
        if name not in properties:
            out.append(f"{path} requires {name!r}, which is not among its properties")
    for name, value in properties.items():
        out += schema_problems(value, f"{path}.{name}")
    for key in ("anyOf", "oneOf", "allOf"):
        for i, value in enumerate(schema.get(key, ())):
            out += schema_problems(value, f"{path}.{key}[{i}]")
    if isinstance(schema.get("items"), Mapping):
        out += schema_problems(schema["items"], f"{path}[]")
    return out
