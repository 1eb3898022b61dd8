"""`stepladder sample`: the good episodes of a model or an endpoint as training files, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from stepladder.errors import ConfigError
from stepladder.evaluation import held_out
from stepladder.rollout import derive_seed, rollout
from stepladder.sections.rejection_sampling import Selection
from stepladder.training.progress import Display
from stepladder.training.records import encode_line, trajectory_to_dict
from stepladder.training.rl import refuse_dead_world
from stepladder.training.rows import ACCEPTED, PAIRS, accepted_row, pair_row
from stepladder.training.selection import Seen, accepted, best_and_worst, select
from stepladder.training.table import open_table, table_recipe
from stepladder.training.tally import count, told
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

    Raises ConfigError where `out` holds such files already, and for a selection that contradicts itself.
    """
    chosen = _selection(selection)
    present = [name for name in (ACCEPTED, PAIRS, "trajectories.jsonl") if (out / name).exists()]
    if present:
        raise ConfigError(f"{out / present[0]} exists; choose another folder, or delete it")
    recipe = table_recipe(
        model,
        environment,
        overrides,
        seed=seed,
        endpoint_model=endpoint_model,
        rewards=[reward] if reward else [],
    )
    tally, seen = dict[str, int](), Seen()
    with open_table(recipe, model, endpoint_model) as table:
        todo = held_out(table.world, split, tasks)
        display = Display(console)
        display.start("evaluating", tasks * n, 0, unit="episodes")
        out.mkdir(parents=True, exist_ok=True)
        for start in range(0, tasks, BATCH):
            groups = table.runner.run(
                rollout(
                    table.agents(temperature),
                    table.world,
                    [(f"sample-{task.id}", task) for task in todo[start : start + BATCH]],
                    group_size=n,
                    limits=table.limits,
                    seed=seed,
                    scorer=table.scorer,
                    on_trajectory=display.trajectory,
                )
            )
            refuse_dead_world(groups)
            _write(out, groups, chosen, seen, tally, seed)
        display.stop()
    (console or Console()).print(f"{told(tally, n)}\n{out / ACCEPTED}\n{out / PAIRS}", highlight=False)
    return tally


def _write(
    out: Path, groups: Sequence[Group], chosen: Selection, seen: Seen, tally: dict[str, int], seed: int
) -> None:
    selected = [select(g, chosen, seen, seed=derive_seed(seed, g.id)) for g in groups]
    pairs = [pair for g in groups if (pair := best_and_worst(g, chosen)) is not None]
    count(tally, groups, selected, pairs=len(pairs))
    rows = {
        ACCEPTED: [accepted_row(t) for t in accepted(groups, selected)],
        PAIRS: [pair_row(*pair) for pair in pairs],
        "trajectories.jsonl": [trajectory_to_dict(t) for g in groups for t in g.trajectories],
    }
    for name, lines in rows.items():
        with (out / name).open("ab") as file:
            file.writelines(encode_line(line) for line in lines)


def _selection(settings: Mapping[str, Any]) -> Selection:
    try:
        return Selection.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"--{part}: " for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        got = f"; got {first['input']!r}" if first["loc"] else ""
        raise ConfigError(f"{where}{message}{got}") from None
