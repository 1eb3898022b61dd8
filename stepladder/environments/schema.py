"""A typed Python function as a tool: its JSON schema, and the check of a call's arguments.

The signature is read once into a pydantic model; its schema is what the model is shown, and its validation
is what a call meets, so the two cannot disagree.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError

from stepladder.environments.docstrings import parse_docstring
from stepladder.errors import ConfigError, ToolError, nearest
from stepladder.types import JsonSchema, Tool

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=False, coerce_numbers_to_str=True)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What is known of a tool function: the Tool as shown, and the model that checks its arguments."""

    tool: Tool
    model: type[BaseModel]
    fields: Mapping[str, str]  # parameter name -> field name of the model

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; raises ToolError saying what is wrong with which."""
        _refuse_unknown(self.tool.name, arguments, self.fields)
        try:
            checked = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(f"{self.tool.name}: {_explained(error)}") from None
        # Only what was given: the function's own defaults stay its own.
        return {name: getattr(checked, field) for name, field in self.fields.items() if name in arguments}


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """A Tool whose JSON schema comes from the signature and docstring of `function`.

    Parameters may be str, int, float, bool, list, dict, Literal, Enum, Optional, Union, dataclasses,
    TypedDicts and pydantic models; descriptions come from "Args:" (Google), "Parameters" (NumPy) or
    ":param x:" (reST). Raises ConfigError for *args, **kwargs and untyped parameters.

    >>> def add(a: int, b: int = 0) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_from_function(add).parameters["required"]
    ['a']
    """
    tool = spec_of(function).tool
    return Tool(tool.name, tool.description, tool.parameters, function)


def spec_of(function: Callable[..., Any], *, method: bool = False) -> ToolSpec:
    """The (cached) specification of a function or bound method; `method`: a method seen from its class."""
    return _spec(getattr(function, "__func__", function), method or inspect.ismethod(function))


def spec_behind(tool: Tool) -> ToolSpec | None:
    """The specification that `tool` was made from, or None where its schema was written by hand."""
    if tool.function is None:
        return None
    try:
        spec = spec_of(tool.function)
    except ConfigError:
        return None
    return spec if spec.tool.parameters is tool.parameters else None


@functools.lru_cache(maxsize=4096)
def _spec(function: Callable[..., Any], bound: bool) -> ToolSpec:
    name = str(getattr(function, "__stepladder_name__", None) or getattr(function, "__name__", ""))
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(
            f"{function!r} needs a tool name of letters, digits, _ . and -, such as 'search'; got {name!r}. "
            "Write @tool(name='search')"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if bound:
        parameters = parameters[1:]
    summary, described = parse_docstring(inspect.getdoc(function) or "")
    hints = _hints(function, name)
    fields: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        _refuse_untyped(name, parameter, hints)
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        annotation, note = _annotation(hints[parameter.name])
        # Numbered fields with the real name as alias: a parameter may be called "copy" or "schema".
        field = f"argument_{index}"
        fields[parameter.name] = field
        definitions[field] = (
            annotation,
            Field(default, alias=parameter.name, description=described.get(parameter.name) or note),
        )
    model = _model(name, definitions)
    description = summary or name.replace("_", " ")
    return ToolSpec(Tool(name, description, _schema(name, model)), model, fields)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"the type hints of tool {name!r} cannot be read: {error}. Types used by a tool must be defined "
            "at the top of its module"
        ) from error


def _refuse_untyped(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ConfigError(
            f"tool {name!r} takes {parameter}; a model cannot be shown open-ended parameters. Name each one, "
            "such as `query: str`, or take one `items: list[str]`"
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(f"tool {name!r} takes {parameter.name!r} by position only; remove the '/'")
    if parameter.name not in hints:
        raise ConfigError(
            f"parameter {parameter.name!r} of tool {name!r} has no type; write `{parameter.name}: str` "
            "(or int, float, bool, list[str], ...)"
        )


def _annotation(hint: Any) -> tuple[Any, str | None]:
    """The type, and a plain-string note from Annotated[T, "note"]."""
    if get_origin(hint) is Annotated:
        notes = [extra for extra in get_args(hint)[1:] if isinstance(extra, str)]
        return hint, notes[0] if notes else None
    return hint, None


def _model(name: str, definitions: dict[str, Any]) -> type[BaseModel]:
    try:
        model: type[BaseModel] = create_model(f"{name}_arguments", __config__=_CONFIG, **definitions)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(
            f"a parameter of tool {name!r} has a type that JSON cannot carry: {str(error).splitlines()[0]}. "
            "Use str, int, float, bool, list, dict, Literal, Enum, a dataclass or a pydantic model"
        ) from error
    return model


def _schema(name: str, model: type[BaseModel]) -> JsonSchema:
    try:
        schema = model.model_json_schema(by_alias=True)
    except PydanticInvalidForJsonSchema as error:
        raise ConfigError(f"a parameter of tool {name!r} has no JSON schema: {error.message}") from error
    definitions = schema.pop("$defs", {})
    body = _inlined(schema, definitions, ())
    body.pop("description", None)
    out = {"type": "object", "properties": body.get("properties", {}), "required": body.get("required", [])}
    if "$ref" in repr(out):  # a type that contains itself cannot be written out
        out["$defs"] = {key: _inlined(value, {}, ()) for key, value in definitions.items()}
    return out


def _inlined(node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], names: bool = False) -> Any:
    """The schema with references written out and generated titles dropped: shorter for the model.

    `names`: the keys of this node are property names, so that one called "title" is kept.
    """
    if isinstance(node, list):
        return [_inlined(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    target = str(node.get("$ref", "")).rpartition("/")[2] if not names else ""
    if target in definitions and target not in inside:
        extras = {key: value for key, value in node.items() if key != "$ref"}
        return {**_inlined(definitions[target], definitions, (*inside, target)), **extras}
    return {
        key: _inlined(value, definitions, inside, names=not names and key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title"
    }


def _refuse_unknown(tool: str, arguments: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = [name for name in arguments if name not in known]
    if unknown:
        has = f" It takes: {', '.join(known)}." if known else " It takes no arguments."
        raise ToolError(f"{tool} has no argument {unknown[0]!r}.{nearest(unknown[0], known)}{has}")


def _explained(error: ValidationError) -> str:
    """One short sentence per wrong argument, as a model can read it."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            lines.append(f"argument {where!r} is missing")
        else:
            lines.append(f"argument {where!r} is {_shown(item['input'])}: {item['msg']}")
    return "; ".join(lines[:5])


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def check_against_schema(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a tool that has a schema but no signature here (a remote one), checked at the top level.

    Names, required ones and simple types are checked; "5" is taken for 5 where a number is asked. What lies
    deeper is left to the tool itself. Raises ToolError.
    """
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    if not tool.parameters.get("additionalProperties", False):
        _refuse_unknown(tool.name, arguments, properties)
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"{tool.name}: argument {name!r} is missing")
    return {name: _coerced(tool.name, name, value, properties.get(name)) for name, value in arguments.items()}


def _coerced(tool: str, name: str, value: Any, schema: Any) -> Any:
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [wanted] if isinstance(wanted, str) else list(wanted or ())
    allowed = tuple(kind for key in kinds for kind in JSON_TYPES.get(key, (object,)))
    is_bool = isinstance(value, bool)  # bool is an int in Python, not in JSON
    if not kinds or (isinstance(value, allowed) and not (is_bool and bool not in allowed)):
        return value
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value)
    if isinstance(value, str) and ("integer" in kinds or "number" in kinds):
        if re.fullmatch(r"\s*[+-]?\d{1,300}\s*", value):
            return int(value)
        if "number" in kinds and re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\s*", value):
            return float(value)
    raise ToolError(
        f"{tool}: argument {name!r} is {_shown(value)}; it should be of type {' or '.join(kinds)}"
    )
