"""`stepladder sample`: the good episodes of a model or an endpoint as training files, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """What is played, and what of it is kept; `selection` holds the keys of `Selection`."""

    environment: str
    selection: Mapping[str, Any]
    overrides: Sequence[str] = ()
    n: int = 8
    tasks: int = 100
    split: str = "train"
    temperature: float = 1.0
    seed: int = 0
    reward: str | None = None
    endpoint_model: str = ""

    def note(self, model: str, chosen: Selection) -> dict[str, Any]:
        """Return what another command must share to go on with the files of this one."""
        shared = {k: v for k, v in asdict(self).items() if k not in ("tasks", "endpoint_model")}
        # The same model may be served elsewhere now.
        name = self.endpoint_model if is_endpoint(model) else model
        return {**shared, "model": name, "selection": chosen.model_dump()}


def sample_files(
    model: str, settings: SampleSettings, *, out: Path, console: Console | None = None
) -> dict[str, int]:
    """Write accepted.jsonl, pairs.jsonl and trajectories.jsonl into `out`; return the tally.

    When it was stopped, or is asked for more tasks, it goes on with the files that the same settings wrote.
    Raises ConfigError where `out` holds others, or all that is asked for, and for a selection that
    contradicts itself.
    """
    s, chosen = settings, _selection(settings.selection)
    note = SampleNote.open(out, s.note(model, chosen), s.tasks)
    recipe = playground_recipe(
        model,
        s.environment,
        s.overrides,
        seed=s.seed,
        endpoint_model=s.endpoint_model,
        rewards=[s.reward] if s.reward else [],
    )
    with open_playground(recipe, model, s.endpoint_model) as opened:
        todo = held_out(opened.player.world, s.split, s.tasks)
        display = Display(console)
        display.start("evaluating", s.tasks * s.n, note.done * s.n, unit="episodes")
        out.mkdir(parents=True, exist_ok=True)
        note.save()
        for start in range(note.done, s.tasks, BATCH):
            groups = opened.play(
                [(f"sample-{task.id}", task) for task in todo[start : start + BATCH]],
                group_size=s.n,
                temperature=s.temperature,
                seed=s.seed,
                on_trajectory=display.trajectory,
            )
            refuse_dead_world(groups, again="the same command goes on from here")
            _add(note, groups, chosen, s.seed)
        display.stop()
    (console or Console()).print(f"{told(note.tally, s.n)}\n{out / ACCEPTED}\n{out / PAIRS}", highlight=False)
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
