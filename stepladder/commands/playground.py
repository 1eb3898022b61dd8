"""What a model is played with outside a run: world, agents and an event loop, local or at an endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepladder.errors import ConfigError
from stepladder.play.agent import Agents
from stepladder.play.endpoint_agent import EndpointAgent, endpoint_client, require_endpoint
from stepladder.play.loop_thread import LoopThread
from stepladder.play.player import Player
from stepladder.recipe.config import EvalRecipe, eval_recipe
from stepladder.reports.run import RECIPE
from stepladder.run.folder import model_folder, read_recipe
from stepladder.types import Group, Task
from stepladder.workbench.bench import Workbench
from stepladder.workbench.paths import import_path
from stepladder.workbench.prepare import limits_of, make_scorer, make_world, prepare


class Playground(NamedTuple):
    """What episodes are played with, and where. `bench` is None for a model at an endpoint."""

    runner: LoopThread
    player: Player
    bench: Workbench | None = None

    def play(self, tasks: Sequence[tuple[str, Task]], **options: Any) -> list[Group]:
        """Play episodes and wait for them; `options` are those of `Player.play`."""
        return self.runner.run(self.player.play(tasks, **options))


def playground_recipe(
    model: str,
    environment: str,
    overrides: Sequence[str],
    *,
    seed: int,
    endpoint_model: str,
    rewards: Sequence[str] = (),
) -> EvalRecipe:
    """Return the sections that a model is played with; a run brings its own limits, and options of its world.

    Raises ConfigError for an endpoint without a model's name.
    """
    sections: dict[str, Any] = {"environment": {"name": environment}, "run": {"seed": seed}}
    if is_endpoint(model):
        if not endpoint_model:
            raise ConfigError("name the model that the endpoint serves: --endpoint-model NAME")
    else:
        sections = _trained_with(model, environment) | {"run": {"seed": seed}}
        sections["model"] = {"name": str(model_folder(model))}
    if rewards:
        own = list(sections["environment"].get("rewards", ()))
        sections["environment"] = {**sections["environment"], "rewards": [*own, *rewards]}
    return eval_recipe(sections, overrides)


def is_endpoint(model: str) -> bool:
    """Return whether `model` is an address."""
    return model.startswith(("http://", "https://"))


@contextlib.contextmanager
def open_playground(recipe: EvalRecipe, model: str, endpoint_model: str) -> Iterator[Playground]:
    """Load the model, or connect to the endpoint, and set the world up; all of it ends with the block."""
    r = recipe.rollout
    if not is_endpoint(model):
        with contextlib.closing(prepare(recipe)) as bench:
            yield Playground(bench.runner, bench.player, bench)
        return
    world, scorer = make_world(recipe), make_scorer(recipe)
    client = endpoint_client(model, deadline=r.deadline)

    def agents(temperature: float, max_tokens: int | None = None) -> Agents:
        def make(key: str) -> EndpointAgent:
            return EndpointAgent(
                client, endpoint_model, temperature=temperature, max_tokens=max_tokens or r.max_tokens
            )

        return make

    with LoopThread() as runner:
        try:
            runner.run(require_endpoint(client, model))
            runner.run(world.setup())
            try:
                yield Playground(runner, Player(agents, world, limits_of(recipe), scorer, r.temperature))
            finally:
                runner.run(world.teardown())
        finally:
            runner.run(client.aclose())


def run_sections(path: Path) -> dict[str, Any]:
    """Return the [environment] and [rollout] sections of a run; one on files alone has no environment."""
    data = read_recipe(path)
    return {key: data[key] for key in ("environment", "rollout") if key in data}


def _trained_with(model: str, environment: str) -> dict[str, Any]:
    """Return the limits that a run was trained with and, where it is the same world, its options."""
    if not (Path(model) / RECIPE).is_file():
        return {"environment": {"name": environment}}
    sections = run_sections(Path(model))
    if sections.get("environment", {}).get("name") not in (environment, import_path(environment)):
        sections["environment"] = {"name": environment}
    return sections
