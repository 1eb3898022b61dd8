"""Tools: marking functions as tools, and executing what a model asked for.

What the model got wrong (a malformed call, an unknown name, a wrong argument, an input the tool refuses) is
told to the model and counted. What the tool's author got wrong (PROGRAMMING_ERRORS: TypeError, NameError,
AttributeError, ImportError, AssertionError, NotImplementedError, ...) ends the run with its traceback.
Nothing malformed is ever executed.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import pydantic_core

from stepladder.deadlines import PROGRAMMING_ERRORS, DeadlinePassed, call_bounded
from stepladder.environments.schema import check_against_schema, spec_behind, spec_of, tool_from_function
from stepladder.errors import BoundaryError, ConfigError, ToolError, nearest
from stepladder.types import Content, ImagePart, Message, TextPart, Tool, ToolCall

__all__ = ["ToolBox", "ToolOptions", "tool", "tool_from_function", "tools_of"]

# Not the model's fault: an infrastructure failure, or a mistake in the tool itself.
_LOUD: tuple[type[BaseException], ...] = (BoundaryError, *PROGRAMMING_ERRORS)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What @tool(...) said. `inline` runs a plain function on the event loop's thread, with no deadline."""

    deadline: float | None = None
    inline: bool = False


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *, name: str | None = None, deadline: float | None = None, inline: bool = False
) -> Callable[[F], F]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    deadline: float | None = None,
    inline: bool = False,
) -> Any:
    """Mark a typed function or method as a tool: `@tool` or `@tool(name=..., deadline=5.0)`.

    deadline: seconds one call may take. inline: call it directly, with no thread and no deadline; for pure,
    fast functions only.

    >>> @tool(deadline=2.0)
    ... def shout(text: str) -> str:
    ...     "Say it loudly."
    ...     return text.upper()
    >>> shout("hello")
    'HELLO'
    """
    if deadline is not None and not deadline > 0:
        raise ConfigError(
            f"@tool(deadline={deadline!r}): a deadline is a number of seconds above 0, such as 5.0"
        )
    if inline and deadline is not None:
        raise ConfigError("@tool(inline=True) runs without a deadline; leave out one of the two")

    def mark(target: F) -> F:
        if isinstance(target, (staticmethod, classmethod)):
            raise ConfigError(f"write @tool under @{type(target).__name__}, not above it")
        if inline and inspect.iscoroutinefunction(target):
            raise ConfigError(f"{target.__name__} is async; @tool(inline=True) is for plain functions")
        target.__stepladder_tool__ = ToolOptions(deadline, inline)  # type: ignore[attr-defined]
        if name is not None:
            target.__stepladder_name__ = name  # type: ignore[attr-defined]
        return target

    return mark if function is None else mark(function)


@functools.lru_cache(maxsize=1024)
def _tool_names(cls: type) -> tuple[str, ...]:
    """Attribute names of the methods that @tool marked, in the order they were written, bases first."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if hasattr(getattr(value, "__func__", value), "__stepladder_tool__"):
                names[name] = None
    return tuple(name for name in names if hasattr(getattr(cls, name, None), "__stepladder_tool__"))


def tools_of(target: Any) -> tuple[Tool, ...]:
    """The tools of an object (bound to it) or of a class (schemas only)."""
    if isinstance(target, type):
        names = _tool_names(target)
        return tuple(spec_of(getattr(target, n), method=_is_method(target, n)).tool for n in names)
    cls: type = type(target)
    return tuple(tool_from_function(getattr(target, name)) for name in _tool_names(cls))


def _is_method(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if name in vars(base):
            return not isinstance(vars(base)[name], (staticmethod, classmethod))
    return False


class ToolBox:
    """Executes tool calls. One per environment instance; cheap to make.

    tools: Tools, or functions to make tools of. deadline: seconds per call, where a tool names none.
    max_output_chars: longer output is cut with a visible mark. max_calls_per_turn: of one assistant message;
    the rest is answered by one message. `counts` says what happened: calls, malformed, unknown, invalid,
    failed, deadline, cut, skipped.

    Raises ConfigError for two tools of one name.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]],
        *,
        deadline: float = 10.0,
        max_output_chars: int = 20_000,
        max_calls_per_turn: int = 8,
    ) -> None:
        self.tools = tuple(t if isinstance(t, Tool) else tool_from_function(t) for t in tools)
        self.deadline = deadline
        self.max_output_chars = max_output_chars
        self.max_calls_per_turn = max_calls_per_turn
        self.counts: Counter[str] = Counter()
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) != len(self.tools):
            names = Counter(tool.name for tool in self.tools)
            twice = [name for name, count in names.items() if count > 1]
            raise ConfigError(f"two tools are called {twice[0]!r}; rename one with @tool(name=...)")
        if not (deadline > 0 and max_output_chars > 0 and max_calls_per_turn > 0):
            raise ConfigError(
                f"a ToolBox needs limits above 0, such as deadline=10.0, max_output_chars=20000, "
                f"max_calls_per_turn=8; got {deadline}, {max_output_chars}, {max_calls_per_turn}"
            )

    def info(self) -> dict[str, Any]:
        """For `Step.info`: {"tool_counts": {...}} of the episode so far, empty before the first call."""
        return {"tool_counts": dict(self.counts)} if self.counts else {}

    async def call_all(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """One message per call, in order, one after the other; one summary for those above the cap."""
        messages = [await self.call(call) for call in calls[: self.max_calls_per_turn]]
        rest = calls[self.max_calls_per_turn :]
        if rest:
            self.counts["skipped"] += len(rest)
            text = (
                f"Error: {len(rest)} of {len(calls)} calls were not run; at most "
                f"{self.max_calls_per_turn} calls may be made in one message."
            )
            messages.append(_answer(rest[0], text))
        return tuple(messages)

    async def call(self, call: ToolCall) -> Message:
        """The tool message that answers `call`. Raises only what is not the model's fault."""
        self.counts["calls"] += 1
        try:
            return _answer(call, self._cut(await self._run(call)))
        except ToolError as error:
            return _answer(call, self._cut(f"Error: {error}"))

    async def _run(self, call: ToolCall) -> Content:
        if call.error is not None:
            self.counts["malformed"] += 1
            raise ToolError(f"the tool call could not be read: {call.error}")
        tool = self._by_name.get(call.name)
        if tool is None:
            self.counts["unknown"] += 1
            known = (
                f" The tools are: {', '.join(self._by_name)}." if self._by_name else " There are no tools."
            )
            raise ToolError(f"there is no tool {call.name!r}.{nearest(call.name, self._by_name)}{known}")
        if tool.function is None:
            raise ConfigError(
                f"tool {tool.name!r} lives elsewhere; a ToolBox runs only tools with a function"
            )
        try:
            arguments = _checked(tool, call.arguments)
        except ToolError:
            self.counts["invalid"] += 1
            raise
        return _content(tool.name, await self._execute(tool, tool.function, arguments))

    async def _execute(self, tool: Tool, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        options: ToolOptions = getattr(function, "__stepladder_tool__", None) or ToolOptions()
        deadline = options.deadline or self.deadline
        try:
            return await call_bounded(function, (), arguments, deadline=deadline, inline=options.inline)
        except DeadlinePassed:
            self.counts["deadline"] += 1
            raise ToolError(f"{tool.name} took longer than {deadline:g} s and was stopped") from None
        except ToolError:
            self.counts["failed"] += 1
            raise
        except _LOUD as error:
            error.add_note(f"raised by tool {tool.name!r}, called with {dict(arguments)!r}")
            raise
        except Exception as error:  # whatever else a tool raises is its answer to this input
            self.counts["failed"] += 1
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _cut(self, content: Content) -> Content:
        if not isinstance(content, str) or len(content) <= self.max_output_chars:
            return content
        self.counts["cut"] += 1
        total, kept = len(content), self.max_output_chars
        return f"{content[:kept]}... [cut: {total - kept:,} of {total:,} characters]"


def _checked(tool: Tool, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = spec_behind(tool)
    return spec.check(arguments) if spec is not None else check_against_schema(tool, arguments)


def _answer(call: ToolCall, content: Content) -> Message:
    return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)


def _content(name: str, value: Any) -> Content:
    """A tool's result as message content: text as it is, images as parts, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, (TextPart, ImagePart)):
        return (value,)
    if isinstance(value, tuple) and value and all(isinstance(v, (TextPart, ImagePart)) for v in value):
        return value
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except pydantic_core.PydanticSerializationError as error:
        raise TypeError(
            f"tool {name!r} returned a {type(value).__name__}, which JSON cannot carry ({error}); "
            "return a str, a number, a list, a dict, a dataclass or a pydantic model"
        ) from error
