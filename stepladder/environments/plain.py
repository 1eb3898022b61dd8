"""A newcomer's plain class as an environment: methods marked @tool, a reward, and nothing to inherit.

    class Shop:
        def __init__(self): self.prices = {"tea": 4, "jam": 7}

        @tool
        def price(self, item: str) -> int:
            "The price of an item in the shop."
            return self.prices[item]

        def reward(self, answer: str) -> float:
            return float(self.task.reference in answer)

        @staticmethod
        def tasks(split: str) -> list[dict]:
            return [{"prompt": "What does tea cost?", "reference": "4"}]

One object is made for each episode and `self.task` is set on it. The episode ends with the first assistant
message that calls no tool: that text is `answer`. A class that sets `self.done = True` in a tool ends it
there. Optional: `reset(self, task)` (or `reset(self, task, seed)`) returns the opening messages, by default
the task's own; `reward(self, answer, task)`; `close(self)`; `splits = ("train", "test")` names the splits
that `tasks` is asked for; `demonstrations(self, count, seed)`, called on an object that has no task. Every
method but that one may be async. `inline = True` on the class calls its methods directly, with no thread
and no deadline: for fast ones that never wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from stepladder.boundary import to_messages, to_score, to_tasks
from stepladder.deadlines import guarded
from stepladder.environments.tools import ToolBox, tools_of
from stepladder.errors import ConfigError, EnvironmentFault, RewardError
from stepladder.types import Message, Reset, Score, Step, Task


class TaskTable:
    """The tasks of a class: from `tasks=`, from its `tasks(split)`, or from its splits/count/get."""

    def __init__(self, cls: type, tasks: Any, options: Mapping[str, Any]) -> None:
        self.cls = cls
        self.name = cls.__name__
        self._options = dict(options)
        self.demonstrations = self._made("demonstrations")
        self.preferences = self._made("preferences")
        self.step_solutions = self._made("step_solutions")
        self.disjoint_splits = getattr(cls, "disjoint_splits", True)
        self._given = tasks
        self._own = tasks is None and all(callable(getattr(cls, n, None)) for n in ("splits", "count", "get"))
        self._cache: dict[str, tuple[Task, ...]] = {}
        if tasks is None and not self._own and not callable(getattr(cls, "tasks", None)):
            raise ConfigError(
                f"{self.name} has no tasks; add a static method `tasks(split)` that returns a list such as "
                "[{'prompt': 'What is 2 + 3?', 'reference': '5'}], or give tasks=[...]"
            )
        if tasks is not None and not isinstance(tasks, Mapping):
            self._given = _by_split(to_tasks(tasks, split="train", where="tasks="), tasks)

    def splits(self) -> tuple[str, ...]:
        if self._own:
            return tuple(self.cls.splits())  # type: ignore[attr-defined]
        if self._given is not None:
            return tuple(self._given)
        named = getattr(self.cls, "splits", None)
        if named is not None and not callable(named):
            return (named,) if isinstance(named, str) else tuple(named)
        if not inspect.signature(self.cls.tasks).parameters:  # type: ignore[attr-defined]
            return ("train",)
        return ("train", "test")

    def count(self, split: str) -> int:
        return int(self.cls.count(split)) if self._own else len(self._tasks(split))  # type: ignore[attr-defined]

    def get(self, split: str, i: int) -> Any:
        return self.cls.get(split, i) if self._own else self._tasks(split)[i]  # type: ignore[attr-defined]

    def _made(self, name: str) -> Callable[[int, int], Any] | None:
        """The class's method `name(count, seed)`, None where it has none.

        A static or class method as it is; a plain one on an object made for this, which has no task.
        """
        if not callable(getattr(self.cls, name, None)):
            return None

        def make(count: int, seed: int) -> Any:
            plain = inspect.isfunction(inspect.getattr_static(self.cls, name))
            owner: Any = self.cls(**self._options) if plain else self.cls
            return getattr(owner, name)(count, seed)

        return make

    def _tasks(self, split: str) -> tuple[Task, ...]:
        if split not in self._cache:
            if self._given is not None:
                values, where = self._given[split], "tasks="
            else:
                values, where = self._asked(split), f"tasks({split!r}) of {self.name}"
            self._cache[split] = to_tasks(values, split=split, where=where)
        return self._cache[split]

    def _asked(self, split: str) -> Any:
        tasks = self.cls.tasks  # type: ignore[attr-defined]
        parameters = inspect.signature(tasks).parameters
        if "self" in parameters:
            raise ConfigError(
                f"tasks of {self.name} is asked before any object is made; write @staticmethod above it"
            )
        return tasks(split) if parameters else tasks()


def _by_split(tasks: tuple[Task, ...], rows: Any) -> dict[str, list[Any]]:
    """A flat list: each row goes to the split it names, "train" where it names none."""
    out: dict[str, list[Any]] = {}
    for task, row in zip(tasks, rows, strict=True):
        split = (
            row.split
            if isinstance(row, Task)
            else row.get("split", "train")
            if isinstance(row, Mapping)
            else "train"
        )
        out.setdefault(str(split), []).append(row if not isinstance(row, str) else task)
    return out or {"train": []}


class PlainWorld(TaskTable):
    """A plain class as a world. Raises ConfigError where the class has neither tools nor a reward."""

    TOOL_OPTIONS: ClassVar = ("tool_deadline", "max_output_chars", "max_calls_per_turn")

    def __init__(
        self,
        cls: type,
        tasks: Any,
        options: Mapping[str, Any],
        *,
        deadline: float = 60.0,
        tool_deadline: float = 10.0,
        max_output_chars: int = 20_000,
        max_calls_per_turn: int = 8,
    ) -> None:
        self._deadline = deadline
        self._limits = {
            "deadline": tool_deadline,
            "max_output_chars": max_output_chars,
            "max_calls_per_turn": max_calls_per_turn,
        }
        tools = tools_of(cls)  # a wrong signature is refused now, not in the first episode
        if not tools and not callable(getattr(cls, "reward", None)):
            raise ConfigError(
                f"{cls.__name__} is no environment: it has no method marked @tool and no reward(). "
                "Add one, or give a class with reset(task, *, seed) and step(message)"
            )
        super().__init__(cls, tasks, options)

    def make(self) -> PlainEnvironment:
        return PlainEnvironment(self.cls(**self._options), self._limits, self._deadline)


class PlainEnvironment:
    """One episode around one object of the plain class."""

    inline = True  # its own methods are async and bound the user's ones themselves

    def __init__(self, target: Any, limits: Mapping[str, Any], deadline: float) -> None:
        self._target = target
        self._name = type(target).__name__
        self._deadline = deadline
        self._inline = bool(getattr(target, "inline", False))
        self.judges = callable(getattr(target, "reward", None))
        self.toolbox = ToolBox(tools_of(target), **limits)
        self._task: Task | None = None

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self._task = task
        self._target.task = task
        reset = getattr(self._target, "reset", None)
        opening = None
        if reset is not None:
            names = _parameters(reset)
            args = (task,) if names and names != ("seed",) else ()
            extra = {"seed": seed} if "seed" in names else {}
            opening = await self._call(reset, "reset()", *args, **extra)
        where = f"reset() of {self._name}"
        messages = task.messages if opening is None else to_messages(opening, where=where)
        if not messages:
            raise ConfigError(
                f"task {task.id} of {self._name} opens with no message; give it a 'prompt', or return the "
                "opening message from reset(self, task)"
            )
        return Reset(messages, self.toolbox.tools)

    async def step(self, message: Message) -> Step:
        if self._task is None:
            raise RuntimeError(f"step() of {self._name} before reset(): call reset(task, seed=0) first")
        if message.tool_calls:
            results = await self.toolbox.call_all(message.tool_calls)
            if not getattr(self._target, "done", False):
                return Step(results, info=self.toolbox.info())
        else:
            results = ()
        score = await self._score(message.text)
        info = {**self.toolbox.info(), **({"explanation": score.explanation} if score.explanation else {})}
        return Step(results, score.value, terminated=True, rewards=score.parts, info=info)

    async def _score(self, answer: str) -> Score:
        reward = getattr(self._target, "reward", None)
        if reward is None:
            return Score(0.0)  # reward functions see the finished episode
        extra = {"task": self._task} if "task" in _parameters(reward) else {}
        value = await self._call(reward, "reward()", answer, **extra)
        return to_score(value, where=f"reward() of {self._name}")

    async def close(self) -> None:
        close = getattr(self._target, "close", None)
        if close is not None:
            await self._call(close, "close()")

    async def _call(self, method: Callable[..., Any], phase: str, *args: Any, **kwargs: Any) -> Any:
        error_class = RewardError if phase == "reward()" else EnvironmentFault
        where = f"{phase} of {self._name}"
        return await guarded(
            method, args, kwargs, where, deadline=self._deadline, inline=self._inline, error_class=error_class
        )


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """Parameter names of a bound method, without self."""
    return _signature(getattr(method, "__func__", method), inspect.ismethod(method))


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any], bound: bool) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[int(bound) :]
