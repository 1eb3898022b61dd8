"""`stepladder sample`: the good episodes of a model or an endpoint as training files, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from stepladder.commands.playground import is_endpoint, open_playground, playground_recipe
from stepladder.commands.sample_note import SampleNote
from stepladder.errors import ConfigError
from stepladder.evaluation import held_out
from stepladder.play.rollout import derive_seed
from stepladder.recipe.rejection_sampling import Selection
from stepladder.run.progress import Display
from stepladder.run.records import trajectory_to_dict
from stepladder.run.training_files import ACCEPTED, PAIRS, accepted_row, pair_row
from stepladder.rungs.episodes import refuse_dead_world
from stepladder.rungs.rejection_sampling.acceptance import count, told
from stepladder.rungs.rejection_sampling.selection import accepted, best_and_worst, select
from stepladder.types import Group

BATCH = 16  # tasks played between two writes


def sample_files(
    model: str,
    *,
    environment: str,
    overrides: Sequence[str],
    out: Path,
    n: int,
    tasks: int,
    split: str,
    temperature: float,
    seed: int,
    selection: Mapping[str, Any],
    reward: str | None,
    endpoint_model: str,
    console: Console | None = None,
) -> dict[str, int]:
    """Write accepted.jsonl, pairs.jsonl and trajectories.jsonl into `out`; returns the tally.

    Stopped, or asked for more tasks, it goes on with the files that the same settings wrote. Raises
    ConfigError where `out` holds others, or all that is asked for, and for a selection that contradicts
    itself.
    """
    chosen = _selection(selection)
    asked = {
        "model": endpoint_model if is_endpoint(model) else model,  # the same one may serve elsewhere now
        "environment": environment,
        "overrides": overrides,
        "n": n,
        "split": split,
        "temperature": temperature,
        "seed": seed,
        "selection": chosen.model_dump(),
        "reward": reward,
    }
    note = SampleNote.open(out, asked, tasks)
    recipe = playground_recipe(
        model,
        environment,
        overrides,
        seed=seed,
        endpoint_model=endpoint_model,
        rewards=[reward] if reward else [],
    )
    with open_playground(recipe, model, endpoint_model) as opened:
        todo = held_out(opened.player.world, split, tasks)
        display = Display(console)
        display.start("evaluating", tasks * n, note.done * n, unit="episodes")
        out.mkdir(parents=True, exist_ok=True)
        note.save()
        for start in range(note.done, tasks, BATCH):
            groups = opened.play(
                [(f"sample-{task.id}", task) for task in todo[start : start + BATCH]],
                group_size=n,
                temperature=temperature,
                seed=seed,
                on_trajectory=display.trajectory,
            )
            refuse_dead_world(groups, again="the same command goes on from here")
            _add(note, groups, chosen, seed)
        display.stop()
    (console or Console()).print(f"{told(note.tally, n)}\n{out / ACCEPTED}\n{out / PAIRS}", highlight=False)
    return note.tally


def _add(note: SampleNote, groups: Sequence[Group], chosen: Selection, seed: int) -> None:
    selected = [select(g, chosen, note.seen, seed=derive_seed(seed, g.id)) for g in groups]
    pairs = [pair for g in groups if (pair := best_and_worst(g, chosen)) is not None]
    count(note.tally, groups, selected, pairs=len(pairs))
    rows = {
        ACCEPTED: [accepted_row(t) for t in accepted(groups, selected)],
        PAIRS: [pair_row(*pair) for pair in pairs],
        "trajectories.jsonl": [trajectory_to_dict(t) for g in groups for t in g.trajectories],
    }
    note.add(rows, len(groups))


def _selection(settings: Mapping[str, Any]) -> Selection:
    try:
        return Selection.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"--{part}: " for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        got = f"; got {first['input']!r}" if first["loc"] else ""
        raise ConfigError(f"{where}{message}{got}") from None
