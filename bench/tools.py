"""Tokens a second of episodes whose tool takes 200 ms, beside the same episodes with an instant tool.

    python bench/tools.py [--model FOLDER]

32 episodes at once, 4 turns each, through the library's own loop and engine. The tool is a plain function
that sleeps in a thread, as a user's would. How long each turn is follows from its seed alone (half to one
and a half times `--tokens`, so that episodes drift apart as real ones do): both sides sample the same
number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measuring import Target, model_folder, parser, start

from stepladder.data.chat.renderer import Renderer
from stepladder.engines.local.engine import LocalEngine
from stepladder.environments.environment import as_world
from stepladder.environments.tools import ToolBox, tool
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, rollout
from stepladder.policies.pretrained import load_model
from stepladder.types import Generation, Message, Reset, Sampling, Step, Task, ToolCall, Trajectory

TOWNS = ("Bergen", "Cadiz", "Dublin", "Essen", "Ferrara", "Gdansk", "Haifa", "Izmir", "Jaipur", "Kyoto")


class Weather:
    """Asks its tool after every message of the model's, whatever that says, and ends after `turns`."""

    inline = True

    def __init__(self, seconds: float = 0.2, turns: int = 4) -> None:
        self.seconds, self.turns, self.turn = seconds, turns, 0
        self.box = ToolBox([self.forecast])

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [
            {"prompt": f"Plan day {i} of a journey from {TOWNS[i % 10]} to {TOWNS[i // 10 % 10]}.", "seed": i}
            for i in range(64)
        ]

    @tool
    def forecast(self, town: str) -> str:
        """The weather of a town tomorrow."""
        time.sleep(self.seconds)
        return f"Tomorrow in {town}: rain until noon, then clouds and a light wind, at most 17 degrees."

    async def reset(self, task: Task, *, seed: int) -> Reset:
        return Reset(task.messages, self.box.tools)

    async def step(self, message: Message) -> Step:
        self.turn += 1
        if self.turn == self.turns:
            return Step(terminated=True, reward=1.0)
        call = ToolCall("forecast", {"town": TOWNS[self.turn % 10]}, id="call")
        (answer,) = await self.box.call_all([call])
        return Step((Message("user", answer.text),))

    async def close(self) -> None:
        """Nothing is held."""


class OwnLength:
    """The engine, with turns whose length follows from their seed and that end with the stop token.

    A random model would stop, or not, wherever it likes; here the last token is made the stop token instead.
    """

    def __init__(self, engine: LocalEngine, tokens: int, stop: int) -> None:
        self.engine, self.tokens, self.stop = engine, tokens, stop

    @property
    def version(self) -> int:
        return self.engine.version

    def session(self, key: str = "") -> OwnSession:
        return OwnSession(self, self.engine.session(key))

    async def close(self) -> None:
        await self.engine.close()


class OwnSession:
    def __init__(self, engine: OwnLength, inner: Any) -> None:
        self.engine, self.inner = engine, inner

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        mean = self.engine.tokens
        count = random.Random(sampling.seed).randint(max(1, mean // 2), mean + mean // 2)
        asked = replace(sampling, max_tokens=count, stop_token_ids=())
        made: Generation = await self.inner.generate(prompt_ids, asked)
        ids = (*made.token_ids[:-1], self.engine.stop)
        return replace(made, token_ids=ids, finish_reason="stop")

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> OwnSession:
        return self

    def __exit__(self, *given: object) -> None:
        self.close()


class Table:
    """A model, its engine, and episodes played on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model, tokenizer = load_model(model_folder(options.model), dtype="float32", device="cpu")
        self.renderer = Renderer(tokenizer)
        self.local = LocalEngine(model, dtype="auto", max_rows=max(128, options.episodes))
        self.engine = OwnLength(self.local, options.tokens, self.renderer.stop_token_ids[0])
        self.runner = asyncio.Runner()

    def play(self, seconds: float, turns: int, episodes: int) -> tuple[float, list[Trajectory]]:
        """Seconds of the clock, and the episodes."""
        world = as_world(Weather, seconds=seconds, turns=turns)
        agents = policy_agents(
            self.engine, self.renderer, temperature=1.0, max_tokens=2 * self.options.tokens, max_context=2048
        )
        tasks = [(f"g{i}", world.get("train", i % 64)) for i in range(episodes)]
        self.local.drop_prefixes()
        began = time.perf_counter()
        groups = self.runner.run(
            rollout(agents, world, tasks, group_size=1, limits=Limits(max_turns=turns), seed=0)
        )
        spent = time.perf_counter() - began
        played = [t for g in groups for t in g.trajectories]
        wrong = next((t for t in played if t.stop_reason != "terminated" or len(t.turns) != turns), None)
        if wrong is not None:
            raise RuntimeError(f"an episode ended by {wrong.stop_reason}: {wrong.failure}")
        return spent, played

    def close(self) -> None:
        self.runner.run(self.local.close())
        self.runner.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of both sides, interleaved; equal numbers of tokens are made sure of."""
    table = Table(options)
    table.play(0.0, 2, 2)
    found: dict[str, Any] = {"instant": [], "slow": []}
    try:
        for _ in range(options.repeats):
            counts = set()
            for name, seconds in (("instant", 0.0), ("slow", options.seconds)):
                spent, played = table.play(seconds, options.turns, options.episodes)
                tokens = sum(t.num_sampled_tokens for t in played)
                counts.add(tokens)
                found[name].append(tokens / spent)
            if len(counts) > 1:
                raise RuntimeError(f"the two sides sampled {sorted(counts)} tokens")
            found["tokens"] = counts.pop()
    finally:
        table.close()
    return found


def run(options: argparse.Namespace) -> list[Target]:
    kept = start(options, "tools")
    found = kept.once("tools", lambda: measure(options))
    instant, slow = (statistics.median(found[name]) for name in ("instant", "slow"))
    target = Target(
        f"tools of {options.seconds * 1e3:.0f} ms, share of the speed without", slow / instant, 0.9
    )
    lines = [
        f"{options.episodes} episodes at once of {options.turns} turns, {found['tokens']} tokens in all: "
        f"{instant:.0f} tokens/s with an instant tool, {slow:.0f} with one of {options.seconds * 1e3:.0f} ms "
        f"(medians of {options.repeats} interleaved repeats).",
    ]
    kept.page("Episodes with a slow tool", lines, [target])
    return [target]


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--episodes", type=int, default=32)
    made.add_argument("--turns", type=int, default=4)
    made.add_argument("--tokens", type=int, default=32, help="of a turn, on average")
    made.add_argument("--seconds", type=float, default=0.2, help="that the tool takes")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
