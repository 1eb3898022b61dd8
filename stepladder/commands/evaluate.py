"""`stepladder eval`: a model or an endpoint on any environment, without training."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stepladder.atomic import write_file
from stepladder.commands.playground import open_table, table_recipe
from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation, evaluate, held_out
from stepladder.reports.run import RECIPE
from stepladder.run.files import is_written
from stepladder.run.progress import Display
from stepladder.run.records import encode_line, trajectory_to_dict
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
    require_writable(out)
    recipe = table_recipe(model, environment, overrides, seed=seed, endpoint_model=endpoint_model)
    with open_table(recipe, model, endpoint_model) as table:
        display = Display()
        chosen = held_out(table.player.world, split, tasks)
        display.start("evaluating", len(chosen), 0, unit="tasks")
        result = table.runner.run(
            evaluate(
                table.player,
                chosen,
                temperature=temperature,
                seed=seed,
                on_trajectory=display.trajectory,
            )
        )
        display.stop()
    _print(result, model, environment)
    if out is not None:
        write_trajectories(out, result.trajectories)
    return result


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


def require_writable(out: Path | None) -> None:
    """Raise ConfigError where the file `out` cannot be written: before the evaluation, not after it."""
    if out is None:
        return
    folder = out.resolve().parent
    if (folder / RECIPE).is_file() and is_written(out.name):
        raise ConfigError(f"--out {out} is a file of that run itself; try --out {out.parent / 'eval.jsonl'}")
    try:
        if out.exists():
            out.open("ab").close()
        if not _special(out):
            _try_folder(out.resolve().parent)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}; try --out eval.jsonl") from error


def require_folder(report: Path | None) -> None:
    """Raise ConfigError where files cannot be written into the folder `report`."""
    if report is None:
        return
    try:
        _try_folder(report)
    except OSError as error:
        raise ConfigError(f"--report {report} cannot be written: {error}; try --report eval") from error


def _try_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _special(out: Path) -> bool:
    """A pipe such as /dev/stdout: written as it is, where a file is written aside and renamed."""
    return out.exists() and not out.is_file()


def write_trajectories(out: Path, trajectories: Sequence[Trajectory]) -> None:
    """One line a trajectory. A file that is there is replaced in one step, at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (encode_line(trajectory_to_dict(trajectory)).decode("ascii") for trajectory in trajectories)
    if _special(out):
        with out.open("w", encoding="ascii") as file:
            file.writelines(lines)
    else:
        write_file(out.resolve(), lines)
