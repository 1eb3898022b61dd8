"""`stepladder chat`: talk to a model in the terminal; its tool calls are really executed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stepladder.commands.playground import run_sections
from stepladder.environments.tools import ToolBox
from stepladder.errors import ConfigError
from stepladder.play.agent import Agent
from stepladder.play.rollout import derive_seed
from stepladder.recipe.config import eval_recipe
from stepladder.reports.run import RECIPE
from stepladder.run.folder import model_folder
from stepladder.types import Message, Tool
from stepladder.workbench.bench import Workbench
from stepladder.workbench.prepare import prepare

MAX_CALLS = 8  # model calls that one line of the user may set off


def chat_with(model: str, *, environment: str | None, temperature: float, max_tokens: int) -> None:
    """Read lines until end of file; "/new" starts over. The tools are those of the environment."""
    sections: dict[str, Any] = {}
    if environment is not None:
        sections = {"environment": {"name": environment}}
    elif (Path(model) / RECIPE).is_file():
        sections = run_sections(Path(model))
    if "environment" not in sections:
        raise ConfigError("say whose tools the model may use: --env calculator")
    sections |= {"model": {"name": str(model_folder(model))}, "run": {"exact": False}}
    sections["rollout"] = {**sections.get("rollout", {}), "max_tokens": max_tokens}
    recipe = eval_recipe(sections)
    console = Console()
    with contextlib.closing(prepare(recipe)) as bench:
        system, tools = bench.runner.run(_opening(bench))
        names = ", ".join(tool.name for tool in tools) or "none"
        console.print(f"tools: {names}. End with Ctrl-D, start over with /new.", highlight=False)
        chat = Chat(bench, system, tools, temperature, console)
        while True:
            try:
                line = console.input("[bold]you:[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                break
            if line == "/new":
                chat.restart()
            elif line:
                bench.runner.run(chat.say(line))
        chat.close()


class Chat:
    """One conversation with a person at the other end."""

    def __init__(
        self,
        bench: Workbench,
        system: Sequence[Message],
        tools: Sequence[Tool],
        temperature: float,
        console: Console,
    ) -> None:
        self.bench, self.system, self.tools = bench, list(system), list(tools)
        self.temperature, self.console = temperature, console
        self.toolbox = ToolBox([t for t in tools if t.function is not None])
        self.agent: Agent | None = None
        self.lines = 0

    def restart(self) -> None:
        """Forget what was said."""
        self.close()
        self.console.print("(new conversation)", style="dim")

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
        self.agent = None

    async def say(self, line: str) -> None:
        """One line of the user, and whatever the model does until it answers without a call."""
        user = Message("user", line)
        self.lines += 1
        if self.agent is None:
            self.agent = self.bench.agents(self.temperature)("chat")
            self.agent.begin([*self.system, user], self.tools)
        else:
            self.agent.observe([user])
        for k in range(MAX_CALLS):
            act = await self.agent.act(derive_seed(self.bench.recipe.run.seed, self.lines, k))
            if act.message is None:
                self.console.print("(the context is full; /new starts over)", style="yellow")
                return
            said = act.message.text or ("" if act.message.tool_calls else "(nothing)")
            if said:
                self.console.print("model: ", said, sep="", markup=False, highlight=False)
            if act.finish_reason != "stop":
                self.console.print("(cut off; --max-tokens allows more)", style="yellow")
                self.restart()
                return
            if not act.message.tool_calls:
                return
            results = await self.toolbox.call_all(act.message.tool_calls)
            for call in act.message.tool_calls:
                shown = f"  call {call.name}({dict(call.arguments)})" if call.error is None else call.raw
                self.console.print(shown, style="cyan", markup=False, highlight=False)
            for result in results:
                self.console.print(f"  -> {result.text}", style="green", markup=False, highlight=False)
            self.agent.observe(results)
        self.console.print(f"(stopped after {MAX_CALLS} rounds of tool calls)", style="yellow")


async def _opening(bench: Workbench) -> tuple[list[Message], tuple[Tool, ...]]:
    """The system messages and the tools that an episode of the environment begins with."""
    world = bench.world
    split = next(iter(world.splits()))
    task = world.get(split, 0)
    environment = world.make()
    reset = await environment.reset(task, seed=task.seed)
    await environment.close()
    return [m for m in reset.messages if m.role == "system"], reset.tools
