"""The command line. Only typer and the light layers are imported here; each command imports what it needs.

stepladder train calculator rl.steps=20      a recipe by name or file, with dotted overrides
stepladder plan calculator                   memory and time, before anything is loaded
stepladder eval MODEL --env calculator       a checkpoint, a hub model or an endpoint, without training
stepladder sample MODEL --env calculator     its good episodes as training files
stepladder inspect calculator                the first batch as coloured tokens, before any training
stepladder chat runs/calculator              talk to the trained agent, tools live
stepladder resume runs/calculator            continue a stopped or killed run
stepladder recipes                           what can be trained out of the box
stepladder check-env my_module:MyWorld       does an environment keep its contract?
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stepladder.errors import ConfigError, RunStopped, StepladderError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language-model agents, from supervised fine-tuning to agentic RL.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(help="overrides such as rl.steps=20 model.name=./my-model")
]
PlayedModel = Annotated[
    str, typer.Argument(help="a run folder, a model folder, a bundled or hub name, or an http(s) endpoint")
]
PlayedWorld = Annotated[str, typer.Option(help="the environment: a name or an import path")]
PlayOverrides = Annotated[
    list[str] | None, typer.Argument(help="overrides such as rollout.max_turns=4 model.dtype=float32")
]
Split = Annotated[str, typer.Option(help="the split that tasks are taken from")]
Seed = Annotated[int, typer.Option(help="the seed of sampling")]
EndpointModel = Annotated[str, typer.Option(help="the name of the model at an endpoint")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a bundled recipe's name, or a TOML file")],
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option(help="delete an earlier run of the same name")] = False,
) -> None:
    """Run a recipe: every rung it names, evaluated before and after, in one run folder."""
    from stepladder.recipe.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from stepladder.ladder import train as run

    path = run(loaded, overwrite=overwrite)
    _show(path)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="a bundled recipe's name, a TOML file, or a run folder")],
    overrides: Overrides = None,
) -> None:
    """Show what a recipe will take before anything is loaded: parameters, memory by part, time per step.

    It is estimated from the recipe and the model's config.json, and from two rates that are measured in under
    a second. For a run folder it stands beside what the run measured.
    """
    from stepladder.planning.command import plan_command
    from stepladder.rungs.registry import needs_of

    typer.echo(plan_command(recipe, overrides or [], needs_of), nl=False)


@app.command()
def resume(path: Annotated[Path, typer.Argument(help="a run folder")]) -> None:
    """Continue a run from its newest checkpoint."""
    from stepladder.ladder import resume as run

    _show(run(path))


@app.command()
def recipes() -> None:
    """List the bundled recipes."""
    from rich.console import Console
    from rich.table import Table

    from stepladder.recipe.config import bundled_recipes, load_recipe

    table = Table("recipe", "what it does", box=None)
    for name in bundled_recipes():
        table.add_row(name, load_recipe(name).description)
    Console().print(table)


@app.command(name="eval")
def evaluate(
    model: PlayedModel,
    env: PlayedWorld,
    overrides: PlayOverrides = None,
    tasks: Annotated[int, typer.Option(help="how many tasks are played, the first of the split")] = 100,
    split: Split = "test",
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default 0, and 1 with several samples")
    ] = None,
    seed: Seed = 0,
    samples: Annotated[
        int, typer.Option(min=1, help="how many episodes of each task are played, for pass@k and votes")
    ] = 1,
    k: Annotated[
        str, typer.Option(help="numbers of samples that the curves are shown at, such as 1,4,16")
    ] = "",
    against: Annotated[
        str, typer.Option(help="another model that plays the same tasks, for a paired comparison")
    ] = "",
    reward: Annotated[
        str, typer.Option(help="the import path of the reward that best-of-n and weighted votes go by")
    ] = "",
    answer: Annotated[
        str, typer.Option(help="the import path of a function that reads the answer of a trajectory")
    ] = "",
    budgets: Annotated[
        str, typer.Option(help="limits of sampled tokens per turn that are tried in turn, such as 32,64,128")
    ] = "",
    beam: Annotated[
        int, typer.Option(help="how many samples a beam search draws per step; 0 means no search")
    ] = 0,
    width: Annotated[
        int | None, typer.Option(help="the search keeps one sample in so many; by default 4")
    ] = None,
    step_scorer: Annotated[
        str, typer.Option(help="the import path of f(messages, partials) -> scores, which leads the search")
    ] = "",
    endpoint_model: EndpointModel = "",
    out: Annotated[Path | None, typer.Option(help="a file for the trajectories, as JSONL")] = None,
    report: Annotated[
        Path | None, typer.Option(help="a folder for evaluation.json, evaluation.html and plots")
    ] = None,
) -> None:
    """Evaluate a model, or anything behind an OpenAI-compatible endpoint, on any environment."""
    if width is not None and not beam:
        raise ConfigError(
            f"--width {width} says how many of the samples of a search are kept, and there is none; add "
            f"--beam {4 * max(width, 1)} and --step-scorer, or leave it out"
        )
    from stepladder.commands.evaluate import evaluate_model
    from stepladder.evaluation.asked import Asked
    from stepladder.evaluation.beam import Beam

    asked = Asked(
        environment=env,
        overrides=overrides or [],
        tasks=tasks,
        split=split,
        samples=samples,
        ks=_numbers("--k", k),
        temperature=temperature if temperature is not None else float(samples > 1 or beam > 0),
        seed=seed,
        endpoint_model=endpoint_model,
        reward=reward or None,
        answer=answer or None,
        budgets=_numbers("--budgets", budgets),
        beam=Beam(beam, 4 if width is None else width) if beam else None,
        step_scorer=step_scorer or None,
    )
    evaluate_model(model, asked, against=against or None, out=out, report=report)


@app.command()
def sample(
    model: PlayedModel,
    env: PlayedWorld,
    out: Annotated[Path, typer.Option(help="a new folder for accepted.jsonl and pairs.jsonl")],
    overrides: PlayOverrides = None,
    n: Annotated[int, typer.Option(min=1, help="how many episodes of each task are played")] = 8,
    tasks: Annotated[
        int, typer.Option(min=1, help="how many tasks are played, the first of the split")
    ] = 100,
    split: Split = "train",
    temperature: Annotated[float, typer.Option(help="the temperature of sampling")] = 1.0,
    seed: Seed = 0,
    keep: Annotated[
        str, typer.Option(help="which episodes are kept: all, best, shortest or statistical")
    ] = "all",
    cap: Annotated[int, typer.Option(min=1, help="how many episodes of one task are kept at most")] = 4,
    require: Annotated[
        str, typer.Option(help="what an episode must be to be kept: solved or scored; auto means solved")
    ] = "auto",
    beta: Annotated[float | None, typer.Option(help="the temperature of --keep statistical")] = None,
    reward: Annotated[
        str, typer.Option(help="the import path of a reward that is added to the environment's")
    ] = "",
    endpoint_model: EndpointModel = "",
) -> None:
    """Sample episodes and keep the good ones as training files, for the model itself or for a student."""
    from stepladder.commands.sample import SampleSettings, sample_files

    settings = SampleSettings(
        environment=env,
        selection={"keep": keep, "cap": cap, "require": require, "beta": beta},
        overrides=overrides or [],
        n=n,
        tasks=tasks,
        split=split,
        temperature=temperature,
        seed=seed,
        reward=reward or None,
        endpoint_model=endpoint_model,
    )
    sample_files(model, settings, out=out)


@app.command()
def inspect(
    recipe: Annotated[str, typer.Argument(help="a bundled recipe's name, or a TOML file")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="how many samples of each rung are shown")] = 3,
) -> None:
    """Show the first batch as coloured tokens: who wrote each, what is trained, with which advantage.

    The chat template is dim, the prompt cyan, the environment and its tools magenta, and an assistant that is
    not trained blue. What is trained is green, red or yellow: its advantage is above, below or exactly 0.
    """
    from stepladder.recipe.config import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from stepladder.commands.inspect import inspect_recipe

    inspect_recipe(loaded, samples=samples)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="a run folder, a model folder, or a bundled name")],
    env: Annotated[
        str | None, typer.Option(help="the environment whose tools are used; by default that of the run")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="the most tokens that the model may sample per turn")] = 256,
) -> None:
    """Talk to a model in the terminal; its tool calls are really executed."""
    from stepladder.commands.chat import chat_with

    chat_with(model, environment=env, temperature=temperature, max_tokens=max_tokens)


@app.command(name="check-env")
def check_env(
    env: Annotated[str, typer.Argument(help="a name or an import path such as my_module:MyWorld")],
    options: Annotated[
        list[str] | None, typer.Argument(help="options of the environment, such as digits=3")
    ] = None,
    tasks: Annotated[int, typer.Option(help="how many tasks to try")] = 3,
) -> None:
    """Check that an environment keeps its contract."""
    from stepladder.environments.check import check_environment
    from stepladder.environments.environment import load_world
    from stepladder.recipe.config import environment_options

    given = {"deadline": 10.0, **environment_options(options or [])}
    report = check_environment(load_world(env, **given), tasks=tasks)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    from stepladder import __version__

    typer.echo(__version__)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the comma-separated whole numbers of an option."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers such as 1,4,16; got {text!r}") from None


def _show(path: Path) -> None:
    typer.echo((path / "summary.txt").read_text(encoding="utf-8"))


def main() -> None:
    """Entry point: errors made on purpose are one message and exit code 1, others keep their traceback."""
    if not sys.stdout.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except RunStopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        sys.exit(130)
    except StepladderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
