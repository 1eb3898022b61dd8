"""`stepladder chat`: talk to a model in the terminal; its tool calls are really executed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from stepladder.commands.playground import is_endpoint, open_playground, playground_recipe, run_sections
from stepladder.environments.tools import ToolBox
from stepladder.errors import ConfigError
from stepladder.play.agent import Agent, Agents
from stepladder.play.rollout import derive_seed
from stepladder.reports.run import RECIPE
from stepladder.types import Message, Reset

MAX_CALLS = 8  # model calls that one line of the user may set off
SEED = 0


def chat_with(model: str, *, environment: str | None, temperature: float, max_tokens: int) -> None:
    """Read lines until end of file; "/new" starts over. The tools are those of the environment."""
    if is_endpoint(model):
        raise ConfigError(f"chat loads a model itself, and {model} is an address; name a folder or a model")
    asked = [f"rollout.max_tokens={max_tokens}", "run.exact=false"]
    world = environment or _own_world(model)
    recipe = playground_recipe(model, world, asked, seed=SEED, endpoint_model="")
    console = Console()
    with open_playground(recipe, model, "") as opened:
        opening = opened.runner.run(opened.player.world.opening())
        names = ", ".join(tool.name for tool in opening.tools) or "none"
        console.print(f"tools: {names}. End with Ctrl-D, start over with /new.", highlight=False)
        chat = Chat(opened.player.agents(temperature), opening, console)
        while True:
            try:
                line = console.input("[bold]you:[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                break
            if line == "/new":
                chat.restart()
            elif line:
                opened.runner.run(chat.say(line))
        chat.close()


def _own_world(model: str) -> str:
    """Return the environment that a run was trained in. Raises ConfigError where there is none."""
    own = run_sections(Path(model)) if (Path(model) / RECIPE).is_file() else {}
    if "environment" not in own:
        raise ConfigError("say whose tools the model may use: --env calculator")
    return str(own["environment"]["name"])


class Chat:
    """One conversation with a person at the other end; it begins with the system messages of `opening`."""

    def __init__(self, agents: Agents, opening: Reset, console: Console) -> None:
        self.agents, self.tools, self.console = agents, opening.tools, console
        self.system = [m for m in opening.messages if m.role == "system"]
        self.toolbox = ToolBox([t for t in opening.tools if t.function is not None])
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
        """Take a line of the user, and do what the model asks until it answers without a call."""
        user = Message("user", line)
        self.lines += 1
        if self.agent is None:
            self.agent = self.agents("chat")
            self.agent.begin([*self.system, user], self.tools)
        else:
            self.agent.observe([user])
        for k in range(MAX_CALLS):
            act = await self.agent.act(derive_seed(SEED, self.lines, k))
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
