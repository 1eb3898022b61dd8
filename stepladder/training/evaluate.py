"""`stepladder eval`: a model or an endpoint on any environment, without training."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from stepladder.agents import Agents, EndpointAgent, endpoint_client, require_endpoint
from stepladder.config import EvalRecipe, eval_recipe
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation, evaluate, held_out
from stepladder.reports.run import RECIPE
from stepladder.rollout import Scorer
from stepladder.training.loop_thread import LoopThread
from stepladder.training.progress import Display
from stepladder.training.records import encode_line, trajectory_to_dict
from stepladder.training.setup import limits_of, make_scorer, make_world, prepare
from stepladder.types import Trajectory


def evaluate_model(
    model: str,
    *,
    environment: str,
    overrides: Sequence[str],
    tasks: int,
    split: str,
    temperature: float,
    seed: int,
    endpoint_model: str,
    out: Path | None,
) -> Evaluation:
    """Play `tasks` held-out tasks and print success with its interval, by domain."""
    remote = model.startswith(("http://", "https://"))
    if remote and not endpoint_model:
        raise ConfigError("name the model that the endpoint serves: --endpoint-model NAME")
    sections: dict[str, Any] = {"environment": {"name": environment}, "run": {"seed": seed}}
    if not remote:
        sections = _trained_with(model, environment) | {"run": {"seed": seed}}
        sections["model"] = {"name": str(model_folder(model))}
    recipe = eval_recipe(sections, overrides)
    with _table(recipe, model if remote else None, endpoint_model, temperature) as table:
        display = Display()
        chosen = held_out(table.world, split, tasks)
        display.start("evaluating", len(chosen), 0, unit="tasks")
        result = table.runner.run(
            evaluate(
                table.agents,
                table.world,
                chosen,
                temperature=temperature,
                limits=limits_of(recipe),
                seed=seed,
                scorer=table.scorer,
                on_trajectory=display.trajectory,
            )
        )
        display.stop()
    _print(result, model, environment)
    if out is not None:
        _write(out, result.trajectories)
    return result


def model_folder(name: str) -> str | Path:
    """The trained model inside a run folder; anything else stays what it is."""
    path = Path(name)
    if (path / RECIPE).is_file():
        if not (path / "final").is_dir():
            raise ConfigError(
                f"the run {path} has not finished: it holds no final/ model. Continue it with "
                f"`stepladder resume {path}`"
            )
        return path / "final"
    return name


class _Table(NamedTuple):
    """What an evaluation is played with."""

    runner: LoopThread
    world: CheckedWorld
    agents: Agents
    scorer: Scorer | None


@contextlib.contextmanager
def _table(recipe: EvalRecipe, url: str | None, endpoint_model: str, temperature: float) -> Iterator[_Table]:
    if url is None:
        with contextlib.closing(prepare(recipe)) as bench:
            yield _Table(bench.runner, bench.world, bench.agents(temperature), bench.scorer)
        return
    world, scorer = make_world(recipe), make_scorer(recipe)
    client = endpoint_client(url, deadline=recipe.rollout.deadline)

    def make(key: str) -> EndpointAgent:
        return EndpointAgent(
            client, endpoint_model, temperature=temperature, max_tokens=recipe.rollout.max_tokens
        )

    with LoopThread() as runner:
        try:
            runner.run(require_endpoint(client, url))
            runner.run(world.setup())
            try:
                yield _Table(runner, world, make, scorer)
            finally:
                runner.run(world.teardown())
        finally:
            runner.run(client.aclose())


def _print(result: Evaluation, model: str, environment: str) -> None:
    low, high = result.interval
    table = Table(title=f"{model} on {environment}", box=None)
    for name, justify in (("", "left"), ("solved", "right"), ("n", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    if len(result.by_domain) > 1:
        for domain, (right, n) in result.by_domain.items():
            table.add_row(domain, f"{right / n:.0%}", str(n))
    table.add_row("[bold]all[/]", f"[bold]{result.success:.1%}[/]", str(result.n))
    console = Console()
    console.print(table)
    console.print(
        f"95% interval {low:.1%} to {high:.1%}; temperature {result.temperature:g}; used a tool in "
        f"{result.tool_rate:.0%} of the episodes; {result.truncated} cut off, {result.failed} failed "
        f"(counted as unsolved); {result.seconds:.0f} s",
        highlight=False,
    )
    failed = next((t.failure for t in result.trajectories if t.failure is not None), None)
    if failed is not None:
        console.print(
            f"the first failure, at the {failed.boundary}: {failed.message}", highlight=False, markup=False
        )


def _write(out: Path, trajectories: Sequence[Trajectory]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        for trajectory in trajectories:
            file.write(encode_line(trajectory_to_dict(trajectory)))


def run_sections(path: Path) -> dict[str, Any]:
    """The [environment] and [rollout] sections of a run."""
    data = tomllib.loads((path / RECIPE).read_text(encoding="utf-8"))
    return {key: data[key] for key in ("environment", "rollout") if key in data}


def _trained_with(model: str, environment: str) -> dict[str, Any]:
    """A run is evaluated under the limits it was trained with, and in its world under the same options."""
    if not (Path(model) / RECIPE).is_file():
        return {"environment": {"name": environment}}
    sections = run_sections(Path(model))
    if sections["environment"]["name"] != environment:
        sections["environment"] = {"name": environment}
    return sections
