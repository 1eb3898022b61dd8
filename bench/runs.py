"""Training runs of a benchmark: finished ones are read, interrupted ones resumed, the others made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepladder.ladder import resume, train
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display


def run(
    out: str | Path, name: str, recipe: str | dict[str, Any], settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of phase "rl" of the run `out`/`name`, made where it is not there.

    A run whose settings have changed since is made anew.
    """
    folder = Path(out) / name
    wanted = load_recipe(recipe, [*settings, f"run.out={out}", f"run.name={name}"])
    stamp = Path(out) / f"{name}.json"
    said = json.dumps(wanted.model_dump(mode="json"), sort_keys=True)
    if not (folder / "recipe.toml").is_file() or not stamp.is_file() or stamp.read_text() != said:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(said)
        train(wanted, overwrite=folder.exists(), display=Display(quiet=True))
    elif not (folder / "final").exists():
        resume(folder, display=Display(quiet=True))
    return steps(out, name)


def steps(out: str | Path, name: str) -> list[dict[str, Any]]:
    """The lines of phase "rl" that the run `out`/`name` has written so far."""
    lines = map(json.loads, (Path(out) / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "rl"]


def curve(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """(episodes played so far, value) of every step that has one."""
    out, episodes = [], 0.0
    for line in lines:
        episodes += line["episodes"]
        if key in line:
            out.append((episodes, float(line[key])))
    return out


def held_out(out: str | Path, name: str) -> float:
    """Success of the last evaluation."""
    lines = (Path(out) / name / "evaluations.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["success"])


def reached(line: Sequence[tuple[float, float]], bar: float) -> float | None:
    """Episodes until a curve is at `bar` for the first time."""
    return next((x for x, value in line if value >= bar), None)
