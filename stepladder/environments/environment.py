"""The two protocols, and the door through which anyone's code comes in.

`as_world` takes a World, an Environment class, or a newcomer's plain class, and gives a `CheckedWorld`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from stepladder.boundary import shown
from stepladder.environments.checked import CheckedWorld
from stepladder.environments.plain import PlainWorld, TaskTable
from stepladder.errors import ConfigError, nearest
from stepladder.plugins import load_object
from stepladder.types import Message, Reset, Step, Task

BUNDLED = {
    "calculator": "stepladder.environments.worlds.calculator:CalculatorWorld",
    "hidden_digit": "stepladder.environments.worlds.hidden_digit:HiddenDigitWorld",
    "step_sums": "stepladder.environments.worlds.step_sums:StepSumsWorld",
    "reviews": "stepladder.environments.worlds.reviews:ReviewsWorld",
    "mixed": "stepladder.environments.mixed:MixedWorld",
}


@runtime_checkable
class Environment(Protocol):
    """One episode. Methods may be plain or async. Plain ones run in a thread; set `inline = True` on a class
    whose methods are fast and never wait: they are then called directly, with no deadline. `judges = False`
    says that it gives no score of its own: `environment.rewards` say then whether a task is solved."""

    def reset(self, task: Task, *, seed: int) -> Reset | Awaitable[Reset]:
        """Begin. The same task and seed give the same observations, whatever other instances do."""
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Answer one whole assistant message: its text and its parsed tool calls, malformed ones included."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Release what the episode held; calling it twice is fine."""
        ...


@runtime_checkable
class World(Protocol):
    """What many episodes share: tasks by (split, index), set-up and tear-down, and new environments."""

    def splits(self) -> Sequence[str]: ...

    def count(self, split: str) -> int: ...

    def get(self, split: str, i: int) -> Task: ...

    def setup(self) -> Awaitable[None] | None: ...

    def teardown(self) -> Awaitable[None] | None: ...

    def make(self) -> Environment: ...


def as_world(target: Any, /, *, deadline: float = 60.0, **options: Any) -> CheckedWorld:
    """Any environment as a world.

    target: a World (instance or class); an Environment class; or a plain class with methods marked @tool
    and, where it needs them, `reset(self, task)`, `reward(self, answer)` and `tasks(split)`. deadline:
    seconds for each phase of an episode (tools have their own). options: `tasks=` (a list, or a dict of
    split to list) for a class without tasks of its own; the rest goes to the constructor.

    Raises ConfigError where `target` is none of these, or an option is unknown.
    """
    if isinstance(target, CheckedWorld):
        _no_options(target, options)
        return target
    if isinstance(target, (str, bytes)):
        raise ConfigError(f"as_world takes an object; for the name {target!r} write load_world({target!r})")
    if _has(target, "splits", "count", "get", "make"):
        if isinstance(target, type):
            _known_options(target, options, extra=())
            return CheckedWorld(target(**options), deadline)
        _no_options(target, options)
        return CheckedWorld(target, deadline)
    if not isinstance(target, type):
        raise ConfigError(
            f"{shown(target)} is no world; give the class ({type(target).__name__}) itself, of which one "
            "object is made for each episode, or an object with splits, count, get and make"
        )
    tasks = options.pop("tasks", None)
    if _has(target, "reset", "step"):
        _known_options(target, options)
        return CheckedWorld(_ClassWorld(target, tasks, options), deadline)
    tool_options = {key: options.pop(key) for key in PlainWorld.TOOL_OPTIONS if key in options}
    _known_options(target, options, extra=("tasks", *PlainWorld.TOOL_OPTIONS))
    return CheckedWorld(PlainWorld(target, tasks, options, deadline=deadline, **tool_options), deadline)


def load_world(name: str, /, **options: Any) -> CheckedWorld:
    """A bundled world ("calculator"), or one by import path: "package.module:Name", "path/to/file.py:Name".

    The code of a path runs because the caller named it. Raises ConfigError with the nearest name.
    """
    if ":" not in name:
        if name not in BUNDLED:
            raise ConfigError(
                f"there is no environment {name!r}.{nearest(name, BUNDLED)} There are: {', '.join(BUNDLED)}; "
                "for your own write 'package.module:Name' or 'path/to/file.py:Name'"
            )
        name = BUNDLED[name]
    return as_world(load_object(name, what="environment"), **options)


class _ClassWorld(TaskTable):
    """An Environment class as a world by itself."""

    def make(self) -> Any:
        return self.cls(**self._options)


def _has(target: Any, *names: str) -> bool:
    return all(callable(getattr(target, name, None)) for name in names)


def _no_options(target: Any, options: Mapping[str, Any]) -> None:
    if options:
        raise ConfigError(
            f"options {sorted(options)} were given for {shown(target)}, which is already made; give its class"
        )


def _known_options(cls: type, options: Mapping[str, Any], extra: Sequence[str] = ("tasks",)) -> None:
    if not options:
        return
    parameters = list(inspect.signature(cls).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [*(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY), *extra, "deadline"]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{cls.__name__} has no option {name!r}.{nearest(name, known)} It has: {', '.join(known)}"
            )
