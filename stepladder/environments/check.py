"""The contract, proved on anyone's environment: `check_environment(Shop)` prints what holds and what to do.

Each check is one function that raises `Broken` (with advice) or any error; failures are listed, not raised.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from stepladder.deadlines import DaemonExecutor
from stepladder.environments.checked import CheckedEnvironment, CheckedWorld
from stepladder.environments.environment import as_world, load_world
from stepladder.environments.probes import awkward_messages, example, schema_problems
from stepladder.types import Message, Step, Task, Tool, ToolCall

Status = Literal["pass", "fail", "note"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a report. `advice` says what to do about a failure or note."""

    name: str
    status: Status
    detail: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `check_environment` found; `str(report)` is for people. `ok`: nothing failed (notes may remain).

    `seconds_per_episode`: make + reset + one step + close, or None where that failed.
    """

    name: str
    checks: tuple[Check, ...]
    seconds_per_episode: float | None = None

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "fail")

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(
                f"{check.status.upper():4}  {check.name}" + (f": {check.detail}" if check.detail else "")
            )
            if check.advice:
                lines.append(f"      -> {check.advice}")
        failed = len(self.failures)
        verdict = (
            "keeps the contract" if self.ok else f"breaks the contract in {failed} place{'s' * (failed > 1)}"
        )
        return "\n".join([*lines, f"{self.name} {verdict}."])


class Broken(Exception):
    """A check found the contract broken."""

    def __init__(self, detail: str, advice: str) -> None:
        super().__init__(detail)
        self.advice = advice


class Remark(Broken):
    """Allowed, but worth saying."""


def check_environment(target: Any, *, tasks: int = 3, deadline: float = 10.0, **options: Any) -> Report:
    """Check a World, an Environment class, a plain class or an import path; never raises for its faults.

    tasks: how many tasks to play. deadline: seconds that each phase may take. options: as for `as_world`.
    """
    # A thread of its own, so that it also works where an event loop is running already (a notebook).
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_check(target, tasks, deadline, options))).result()


async def _check(target: Any, tasks: int, deadline: float, options: dict[str, Any]) -> Report:
    asyncio.get_running_loop().set_default_executor(DaemonExecutor())
    checks: list[Check] = []
    world: list[CheckedWorld] = []

    def opens() -> str:
        load = load_world if isinstance(target, str) else as_world
        world.append(load(target, deadline=deadline, **options))
        return ""

    if not await _run(checks, "it is an environment", opens):
        return Report(getattr(target, "__name__", str(target)), tuple(checks))
    checker = _Checker(world[0], tasks)
    for name, check in checker.plan():
        if not await _run(checks, name, check) and check in checker.essential():
            break
    await _run(checks, "teardown", world[0].teardown)
    return Report(world[0].name, tuple(checks), checker.seconds)


async def _run(checks: list[Check], name: str, check: Callable[[], Any]) -> bool:
    try:
        result = check()
        if isinstance(result, Awaitable):
            result = await result
    except Broken as broken:
        status: Status = "note" if isinstance(broken, Remark) else "fail"
        checks.append(Check(name, status, str(broken), broken.advice))
        return status == "note"
    except Exception as error:  # noqa: BLE001  the report lists whatever foreign code raises
        checks.append(Check(name, "fail", f"{type(error).__name__}: {error!s:.300}", _where(error)))
        return False
    checks.append(Check(name, "pass", result or ""))
    return True


def _where(error: BaseException) -> str:
    """File and line in the user's code: the innermost frame, of the original error."""
    origin = error.__cause__ or error
    trace = origin.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or "stepladder" in trace.tb_frame.f_globals.get("__name__", ""):
        return ""
    return f"raised at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


class _Checker:
    """The checks of one world."""

    def __init__(self, world: CheckedWorld, tasks: int) -> None:
        self.world = world
        self.wanted = tasks
        self.tasks: list[Task] = []
        self.tools: tuple[Tool, ...] = ()
        self.seconds: float | None = None

    def plan(self) -> list[tuple[str, Callable[[], Any]]]:
        return [
            ("setup", self.world.setup),
            ("tasks can be listed", self.has_tasks),
            ("splits share no task", self.splits_are_disjoint),
            ("reset gives opening messages", self.resets),
            ("tools have valid schemas", self.tools_are_valid),
            *[(f"step accepts {name}", self.accepts(name)) for name in awkward_messages(())],
            ("every tool can be called", self.tools_run),
            ("an episode ends", self.ends),
            ("same task and seed, same episode", self.is_deterministic),
            ("instances share no state", self.is_isolated),
            ("close can be called at any time", self.closes),
            ("the event loop stays free", self.loop_stays_free),
            ("cost of an episode", self.costs),
        ]

    def essential(self) -> tuple[Callable[[], Any], ...]:
        """Checks without which the later ones mean nothing."""
        return (self.has_tasks, self.resets)

    async def episode(
        self, task: Task, messages: Sequence[Message], environment: CheckedEnvironment | None = None
    ) -> list[Any]:
        """Reset and the steps for `messages`, up to the end."""
        environment = environment or self.world.make()
        try:
            out: list[Any] = [await environment.reset(task, seed=task.seed)]
            for message in messages:
                out.append(await environment.step(message))
                if out[-1].terminated or out[-1].truncated:
                    break
            return out
        finally:
            await environment.close()

    # -- tasks

    def has_tasks(self) -> str:
        counts = {split: self.world.count(split) for split in self.world.splits()}
        split = next((split for split, count in counts.items() if count), None)
        if split is None:
            raise Broken(f"no split has a task: {counts}", "return a list of tasks from tasks(split)")
        self.tasks = [self.world.get(split, i) for i in range(min(self.wanted, counts[split]))]
        for i, task in enumerate(self.tasks):
            if task != self.world.get(split, i):
                raise Broken(
                    f"task {task.id} differs when asked for again", "seed what get() or tasks() draws"
                )
            try:
                json.dumps(dict(task.data))
            except TypeError as error:
                raise Broken(f"data of task {task.id}: {error}", "keep Task.data plain JSON") from None
        if len({task.id for task in self.tasks}) < len(self.tasks):
            raise Broken("two tasks have one id", "give each task its own 'id', or none")
        return ", ".join(f"{split} {count}" for split, count in counts.items())

    def splits_are_disjoint(self) -> str:
        if getattr(self.world.inner, "disjoint_splits", True) is False:
            return "not asked: the world says that its splits share tasks (disjoint_splits = False)"
        seen: dict[str, str] = {}
        for split in self.world.splits():
            for i in range(min(self.world.count(split), 1000)):
                task = self.world.get(split, i)
                other = seen.setdefault(_content(task), split)
                if other != split:
                    raise Broken(
                        f"task {task.id} of {split!r} is in {other!r} too: {task.messages[-1:]!r:.150}",
                        "keep test tasks out of training; where it is meant, set disjoint_splits = False",
                    )
        if sum(1 for split in self.world.splits() if self.world.count(split)) < 2:
            raise Remark("there is only one split with tasks", "add a split, such as 'test', to evaluate on")
        return "the first 1,000 of each"

    # -- reset and tools

    async def resets(self) -> str:
        for task in self.tasks:
            (reset,) = await self.episode(task, [])
            self.tools = reset.tools
        return f"{len(reset.messages)} messages, {len(reset.tools)} tools"

    def tools_are_valid(self) -> str:
        for tool in self.tools:
            problems = schema_problems(tool.parameters)
            if problems:
                raise Broken(f"{tool.name}: {problems[0]}", "make the tool with @tool or tool_from_function")
            json.dumps(tool.to_dict())
        undocumented = [t.name for t in self.tools if t.description == t.name.replace("_", " ")]
        if undocumented:
            raise Remark(
                f"{undocumented[0]!r} has no docstring", "one sentence tells the model what it is for"
            )
        return ", ".join(tool.name for tool in self.tools)

    # -- step

    def accepts(self, name: str) -> Callable[[], Awaitable[str]]:
        async def check() -> str:
            message = awkward_messages(self.tools)[name]  # the tools are known after the first reset
            step: Step = (await self.episode(self.tasks[0], [message]))[-1]
            calls = message.tool_calls
            if calls and not step.messages and not (step.terminated or step.truncated):
                raise Broken(
                    "the episode goes on, but nothing answers the call",
                    "answer each tool call with a message of role 'tool' that says what was wrong",
                )
            if len(step.messages) > 50:
                raise Broken(
                    f"{len(calls)} calls got {len(step.messages)} messages, more than a context can hold",
                    "cap the calls per message; ToolBox.call_all does",
                )
            return "ends the episode" if step.terminated else ""

        return check

    async def tools_run(self) -> str:
        for tool in self.tools:
            arguments = example(tool.parameters)
            call = Message("assistant", tool_calls=(ToolCall(tool.name, arguments, id="1"),))
            step = (await self.episode(self.tasks[0], [call]))[-1]
            if step.info.get("tool_counts", {}).get("deadline"):
                raise Broken(
                    f"{tool.name}({arguments}) hung", "give what it waits for a time limit of its own"
                )
        return "with arguments made from the schema"

    async def ends(self) -> str:
        for task in self.tasks:
            steps = (await self.episode(task, [Message("assistant", str(task.reference))] * 20))[1:]
            if not (steps[-1].terminated or steps[-1].truncated):
                raise Remark(
                    "20 plain answers did not end the episode",
                    "fine for a game; the loop's max_turns will end it",
                )
        if not self.world.make().judges:
            raise Remark(
                "nothing judges an episode: there is no method `reward`",
                "add reward(self, answer) -> float, or environment.rewards to the recipe",
            )
        return f"reward for the reference as the answer: {steps[-1].reward}"

    # -- independence

    def script(self) -> list[Message]:
        calls = [ToolCall(t.name, example(t.parameters), id="1") for t in self.tools[:3]]
        return [*(Message("assistant", tool_calls=(call,)) for call in calls), Message("assistant", "7")]

    async def is_deterministic(self) -> str:
        state = random.getstate()
        try:
            for task in self.tasks:
                random.seed(1)
                first = await self.episode(task, self.script())
                random.seed(2)  # an environment that draws from the global generator is found out
                second = await self.episode(task, self.script())
                _same(
                    first, second, "draw from random.Random(seed) made in reset(), never from `random` itself"
                )
        finally:
            random.setstate(state)
        return ""

    async def is_isolated(self) -> str:
        one, two = self.tasks[0], self.tasks[-1]
        alone = await self.episode(one, self.script())
        environment, other = self.world.make(), self.world.make()
        beside: list[Any] = [await environment.reset(one, seed=one.seed)]
        try:
            await other.reset(two, seed=two.seed + 1)
            for message in self.script()[: len(alone) - 1]:
                await other.step(message)
                beside.append(await environment.step(message))
        finally:
            await environment.close()
            await other.close()
        _same(
            alone, beside, "keep state on self, made in __init__ or reset(); not on the class or the module"
        )
        return ""

    async def closes(self) -> str:
        await self.world.make().close()  # before any reset
        environment = self.world.make()
        await environment.reset(self.tasks[0], seed=0)
        await environment.close()
        await environment.close()
        return ""

    # -- time

    async def loop_stays_free(self) -> str:
        longest, last, running = 0.0, time.monotonic(), True

        async def heartbeat() -> None:
            nonlocal longest, last
            while running:
                await asyncio.sleep(0.01)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()

        beat = asyncio.create_task(heartbeat())
        await self.episode(self.tasks[0], self.script())
        await asyncio.sleep(0.02)
        running = False
        await beat
        if longest > 0.5:
            raise Remark(
                f"an episode held the event loop for {longest:.1f} s; all other episodes waited",
                "make slow methods plain functions (they get a thread), or await inside them",
            )
        return ""

    async def costs(self) -> str:
        timed = []
        for _ in range(20):
            began = time.perf_counter()
            await self.episode(self.tasks[0], [Message("assistant", "7")])
            timed.append(time.perf_counter() - began)
            if sum(timed) > 2.0:
                break
        self.seconds = sorted(timed)[len(timed) // 2]
        return f"{self.seconds * 1e3:.3f} ms for make, reset, one step and close"


def _content(task: Task) -> str:
    """What makes two tasks the same to the model: what it is shown, or what the environment starts from."""
    return repr((task.messages, sorted(task.data.items()), None if task.messages else task.reference))


def _same(first: list[Any], second: list[Any], advice: str) -> None:
    for turn, (one, two) in enumerate(zip(first, second, strict=False)):
        if one != two:
            name = "reset" if turn == 0 else f"step {turn}"
            raise Broken(f"{name} differs: {one!r:.200} and {two!r:.200}", advice)
    if len(first) != len(second):
        raise Broken(f"one episode has {len(first) - 1} steps, the other {len(second) - 1}", advice)
