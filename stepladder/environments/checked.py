"""A world and an environment whose every answer is checked: always async, every phase under a deadline.

The agent loop, evaluation and `check_environment` speak to nothing else; `as_world` makes them of anyone's
code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepladder.boundary import shown, to_conversations, to_messages, to_number, to_task
from stepladder.data.files.records import Preference, Steps
from stepladder.deadlines import PROGRAMMING_ERRORS, guarded
from stepladder.errors import ConfigError, DataError, EnvironmentFault, StepladderError, nearest
from stepladder.types import Message, Reset, Step, Task, Tool


class CheckedWorld:
    """A world whose answers are checked. `name` is that of the user's class; `inner` the user's world."""

    def __init__(self, inner: Any, deadline: float = 60.0) -> None:
        self.inner = inner
        self.deadline = deadline
        self.name = str(getattr(inner, "name", None) or type(inner).__name__)
        self._inline = bool(getattr(inner, "inline", False))

    def splits(self) -> tuple[str, ...]:
        splits = self.inner.splits()
        if isinstance(splits, str) or not all(isinstance(split, str) for split in splits):
            raise TypeError(
                f"splits() of {self.name} returned {shown(splits)}; return names such as ['train', 'test']"
            )
        return tuple(splits)

    def count(self, split: str) -> int:
        if split not in self.splits():
            splits = self.splits()
            has = ", ".join(splits) or "none"
            raise ConfigError(f"{self.name} has no split {split!r}.{nearest(split, splits)} It has: {has}")
        count = self.inner.count(split)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise TypeError(
                f"count({split!r}) of {self.name} returned {shown(count)}; return a number of tasks"
            )
        return count

    def get(self, split: str, i: int) -> Task:
        """Task `i` of a split; raises DataError where there is none, or where it cannot be read."""
        count = self.count(split)
        if not 0 <= i < count:
            raise DataError(f"{self.name} has {count} tasks in split {split!r}; task {i} was asked for")
        try:
            task = self.inner.get(split, i)
        except StepladderError:
            raise
        except PROGRAMMING_ERRORS as error:
            error.add_note(f"raised in get({split!r}, {i}) of {self.name}")
            raise
        except Exception as error:
            raise DataError(
                f"task {i} of split {split!r} cannot be read: get() of {self.name} raised "
                f"{type(error).__name__}: {error}. Mend or remove it; a run that it stopped goes on with "
                "`stepladder resume`"
            ) from error
        return to_task(task, split=split, index=i, where=f"get() of {self.name}")

    async def opening(self) -> Reset:
        """Begin an episode and end it: return what a model is shown first, and its tools."""
        splits = self.splits()
        task = self.get("train" if "train" in splits else splits[0], 0)
        environment = self.make()
        reset = await environment.reset(task, seed=task.seed)
        await environment.close()
        return reset

    @property
    def demonstrates(self) -> bool:
        """Has the world a `demonstrations(count, seed)`?"""
        return callable(getattr(self.inner, "demonstrations", None))

    def demonstrations(self, count: int, seed: int) -> list[tuple[Message, ...]]:
        """`count` conversations to imitate, each ending with the assistant's message; other seed, others.

        Raises ConfigError where the world makes none, DataError for another number of them.
        """
        if not self.demonstrates:
            raise ConfigError(f"{self.name} has no demonstrations(count, seed) method; add one")
        where = f"demonstrations() of {self.name}"
        return to_conversations(self.inner.demonstrations(count, seed), count=count, where=where)

    @property
    def prefers(self) -> bool:
        """Has the world a `preferences(count, seed)`?"""
        return callable(getattr(self.inner, "preferences", None))

    def preferences(self, count: int, seed: int) -> list[Preference]:
        """`count` pairs of a better and a worse answer to one prompt; other seed, others.

        Raises ConfigError where the world makes none, DataError for another number of them or other objects.
        """
        if not self.prefers:
            raise ConfigError(f"{self.name} has no preferences(count, seed) method; add one")
        pairs = list(self.inner.preferences(count, seed))
        wrong = next((pair for pair in pairs if not isinstance(pair, Preference)), None)
        if wrong is not None:
            raise DataError(
                f"preferences() of {self.name} gave {shown(wrong)}; give objects "
                "of stepladder.data.files.records.Preference with a prompt, a chosen and a rejected answer"
            )
        if len(pairs) != count:
            raise DataError(f"preferences() of {self.name} gave {len(pairs)} pairs; {count} were asked for")
        return pairs

    @property
    def labels_steps(self) -> bool:
        """Has the world a `step_solutions(count, seed)`?"""
        return callable(getattr(self.inner, "step_solutions", None))

    def step_solutions(self, count: int, seed: int) -> list[Steps]:
        """`count` solutions in steps, right and wrong ones, each step with its label; other seed, others.

        Raises ConfigError where the world makes none, DataError for another number of them or other objects.
        """
        if not self.labels_steps:
            raise ConfigError(f"{self.name} has no step_solutions(count, seed) method; add one")
        found = list(self.inner.step_solutions(count, seed))
        wrong = next((s for s in found if not isinstance(s, Steps) or len(s.labels) != len(s.steps)), None)
        if wrong is not None:
            raise DataError(
                f"step_solutions() of {self.name} gave {shown(wrong)}; give objects "
                "of stepladder.data.files.records.Steps with a label for each step"
            )
        if len(found) != count:
            raise DataError(
                f"step_solutions() of {self.name} gave {len(found)} solutions; {count} were asked for"
            )
        return found

    def require(self, split: str, n: int) -> None:
        """Raise ConfigError where `split` is not there or has fewer than `n` tasks."""
        count = self.count(split)
        if count < n:
            raise ConfigError(
                f"the split {split!r} has {count} tasks, {n} were asked for; try tasks = {count}"
            )

    async def setup(self) -> None:
        await self._optional("setup")

    async def teardown(self) -> None:
        await self._optional("teardown")

    async def _optional(self, phase: str) -> None:
        method = getattr(self.inner, phase, None)
        if method is not None:
            await guarded(
                method, (), {}, f"{phase}() of {self.name}", deadline=self.deadline * 10, inline=self._inline
            )

    def make(self) -> CheckedEnvironment:
        """A new environment for one episode; raises EnvironmentFault where making it failed.

        Called on the event loop: slow preparation belongs into `reset` or `World.setup`.
        """
        where = f"making a {self.name}"
        try:
            return CheckedEnvironment(self.inner.make(), self.name, self.deadline)
        except StepladderError:
            raise
        except PROGRAMMING_ERRORS as error:
            error.add_note(f"raised while {where}")
            raise
        except Exception as error:
            raise EnvironmentFault(f"{where} raised {type(error).__name__}: {error}") from error

    def __getattr__(self, name: str) -> Any:
        # What only this world has (tools, ...) stays reachable.
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class CheckedEnvironment:
    """An environment whose methods are async, bounded in time, and answer in our nouns or raise.

    A failure of foreign code is an EnvironmentFault (RewardError for the reward); a wrong type a TypeError.
    """

    def __init__(self, inner: Any, name: str, deadline: float) -> None:
        self.inner = inner
        self.name = name
        self._deadline = deadline
        self._inline = bool(getattr(inner, "inline", False))

    @property
    def judges(self) -> bool:
        """Does it score its episodes itself? After `reset`: a mixture's are of several worlds."""
        return bool(getattr(self.inner, "judges", True))

    async def reset(self, task: Task, *, seed: int) -> Reset:
        where = f"reset() of {self.name}"
        return _checked_reset(await self._call(self.inner.reset, where, task, seed=seed), where)

    async def step(self, message: Message) -> Step:
        where = f"step() of {self.name}"
        return _checked_step(await self._call(self.inner.step, where, message), where)

    async def close(self) -> None:
        close = getattr(self.inner, "close", None)
        if close is not None:
            await self._call(close, f"close() of {self.name}")

    async def _call(self, method: Callable[..., Any], where: str, *args: Any, **kwargs: Any) -> Any:
        return await guarded(method, args, kwargs, where, deadline=self._deadline, inline=self._inline)


def _checked_reset(value: Any, where: str) -> Reset:
    if not isinstance(value, Reset):
        value = Reset(to_messages(value, where=where))
    messages = to_messages(value.messages, where=where)
    if not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last one is from {messages[-1].role!r}" if messages else "there are none"
        raise TypeError(f"{where} must give messages that end with one from 'user' or 'tool'; {last}")
    for tool in value.tools:
        if not isinstance(tool, Tool):
            raise TypeError(f"{where} gave {shown(tool)} as a tool; make one with tool_from_function(f)")
    return Reset(messages, tuple(value.tools), value.info)


def _checked_step(value: Any, where: str) -> Step:
    if not isinstance(value, Step):
        raise TypeError(
            f"{where} returned {shown(value)}; return a Step, such as Step(reward=1.0, terminated=True)"
        )
    messages = (
        value.messages if value.messages == () else to_messages(value.messages, where=where, role="tool")
    )
    if any(message.role == "assistant" for message in messages):
        raise TypeError(f"{where} gave an assistant message; only the policy speaks as the assistant")
    for flag in ("terminated", "truncated"):
        if not isinstance(getattr(value, flag), bool):
            raise TypeError(f"{where}: {flag} is {shown(getattr(value, flag))}; give True or False")
    rewards = {
        key: to_number(part, where=f"{where}, rewards[{key!r}],") for key, part in value.rewards.items()
    }
    return Step(
        messages, to_number(value.reward, where=where), value.terminated, value.truncated, rewards, value.info
    )
