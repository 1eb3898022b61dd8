"""Solutions with a label for each step: from a file, made by the environment, or labelled by rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from stepladder.atomic import write_file
from stepladder.data.budget import Dropped, Tally
from stepladder.data.encoder import Encoder
from stepladder.data.files.records import Steps
from stepladder.data.samples import StepSample, step_samples
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import DataError
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.rungs.long_rows import refuse_overlong, too_long
from stepladder.rungs.requirements import require_judge, require_maker, rows_left
from stepladder.rungs.reward_model.ranking_data import budget_of
from stepladder.rungs.reward_model.scoring_files import Report, check_count, read_steps, split_and_encode
from stepladder.rungs.reward_model.step_labels import monte_carlo_steps
from stepladder.rungs.row_errors import naming
from stepladder.types import Message
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources

STEPS_FILE = "steps.jsonl"  # in the run folder: solutions that rollouts labelled


def check_rows(
    recipe: CommonRecipe, settings: ProcessRewardModelSection, world: CheckedWorld | None, sources: Sources
) -> None:
    """Raise DataError or ConfigError for a file or a world that does not give the rows.

    Those that rollouts are to label are not there yet; what is asked for them is a judge and enough tasks.
    """
    name = "process_reward_model"
    if settings.data is not None:
        found = sources.once(read_steps, settings.data)
        check_count(name, found, settings.validation)
        rows_left(name, found.records, settings.validation, recipe.run.seed)
        return
    assert world is not None
    if settings.solutions:
        require_maker(
            recipe,
            world.labels_steps,
            key=f"{name}.solutions",
            what="solutions",
            method="step_solutions",
            instead=f"add one, or set {name}.monte_carlo, whose labels are made by rollouts",
        )
        rows = sources.once(world.step_solutions, settings.solutions, recipe.run.seed)
        rows_left(name, rows, settings.validation, recipe.run.seed)
    else:
        require_judge(recipe, world)
        assert settings.monte_carlo is not None
        world.require("train", settings.monte_carlo.tasks)


def step_data(
    bench: Workbench, settings: ProcessRewardModelSection, folder: Path, *, seed: int, report: Report
) -> tuple[list[StepSample], list[StepSample]]:
    """(training, validation) solutions with no prompt in common. Raises DataError where none is left, or
    some are longer than the model has positions for."""
    rows, said = step_rows(bench, settings, folder, seed=seed)

    def encoded(some: Sequence[Steps], name: str, tally: Tally) -> list[StepSample]:
        return encode(bench.renderer, some, settings, name, tally)

    train, held = split_and_encode(rows, said, settings.validation, seed, encoded, report)
    rows_of = ((solution.sample,) for solution in (*train, *held))
    refuse_overlong(bench.policy, rows_of, too_long("process_reward_model"))
    return train, held


def step_rows(
    bench: Workbench, settings: ProcessRewardModelSection, folder: Path, *, seed: int
) -> tuple[list[Steps], str]:
    """(records, what is to be said of their file). Those that rollouts label are kept in `folder`, so that a
    resumed run has them."""
    if settings.data is not None:
        dataset = bench.sources.once(read_steps, settings.data)
        return dataset.records, dataset.description
    if settings.solutions:
        return bench.sources.once(bench.world.step_solutions, settings.solutions, seed), ""
    file = folder / STEPS_FILE
    if not file.is_file():
        rows = monte_carlo_steps(bench, settings, seed=seed)
        write_file(file, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return [_from_json(line) for line in file.read_text(encoding="utf-8").split("\n") if line], ""


def encode(
    renderer: Encoder, rows: Sequence[Steps], settings: ProcessRewardModelSection, name: str, tally: Tally
) -> list[StepSample]:
    """Solutions as samples with the steps that are trained on; unusable ones are counted in `tally`.

    Raises DataError where nothing is left of some rows.
    """
    out = []
    for i, row in enumerate(rows):
        with naming(row.prompt):
            found = step_samples(
                renderer,
                row,
                group_id=f"{name}-{i}",
                budget=budget_of(settings),
                separator=settings.separator,
                tally=tally,
            )
        if not isinstance(found, Dropped):
            out.append(supervised(found, settings))
    if rows and not out:
        raise DataError(f"none of the {len(rows)} {name} solutions can be used; of all: {tally.text}")
    return out


def supervised(found: StepSample, settings: ProcessRewardModelSection) -> StepSample:
    """With "to_first_wrong", the steps up to and including the first one that is more wrong than right."""
    if settings.supervise == "all":
        return found
    wrong = next((i for i, label in enumerate(found.labels) if label < 0.5), len(found.labels))
    return replace(found, ends=found.ends[: wrong + 1], labels=found.labels[: wrong + 1])


def _from_json(line: str) -> Steps:
    row = json.loads(line)
    prompt = tuple(Message(m["role"], m["content"]) for m in row["prompt"])
    return Steps(prompt, tuple(row["steps"]), tuple(row["labels"]))
