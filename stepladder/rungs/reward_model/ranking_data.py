"""Pairs and rankings for a reward model: from a file, or made by the environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepladder.data.budget import Budget, Dropped, Tally
from stepladder.data.encoder import Encoder
from stepladder.data.files.records import Preference, Ranking
from stepladder.data.samples import preference_samples, ranking_samples
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import DataError
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.recipe.scoring import ScoringSection
from stepladder.rungs.long_rows import refuse_overlong, too_long
from stepladder.rungs.requirements import require_maker, rows_left
from stepladder.rungs.reward_model.ranking_update import Ranked
from stepladder.rungs.reward_model.scoring_files import (
    RankedRow,
    Report,
    check_count,
    read_ranked,
    split_and_encode,
)
from stepladder.rungs.row_errors import naming
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources


def check_rows(
    recipe: CommonRecipe, settings: RewardModelSection, world: CheckedWorld | None, sources: Sources
) -> None:
    """Raise DataError or ConfigError for a file or a world that does not give the rows."""
    rows: Sequence[RankedRow]
    if settings.data is not None:
        found = sources.once(read_ranked, settings.data)
        check_count("reward_model", found, settings.validation)
        rows = found.records
    else:
        assert world is not None
        require_maker(recipe, world.prefers, key="reward_model.pairs", what="pairs", method="preferences")
        rows = sources.once(world.preferences, settings.pairs, recipe.run.seed)
    rows_left("reward_model", rows, settings.validation, recipe.run.seed)


def ranked_data(
    bench: Workbench, settings: RewardModelSection, *, seed: int, report: Report
) -> tuple[list[Ranked], list[Ranked]]:
    """(training, validation) rows with no prompt in common. Raises DataError where none is left, or some
    are longer than the model has positions for."""
    rows: Sequence[RankedRow]
    if settings.data is None:
        rows, said = bench.sources.once(bench.world.preferences, settings.pairs, seed), ""
    else:
        dataset = bench.sources.once(read_ranked, settings.data)
        rows, said = dataset.records, dataset.description

    def encoded(some: Sequence[RankedRow], name: str, tally: Tally) -> list[Ranked]:
        return encode(bench.renderer, some, settings, name, tally)

    train, held = split_and_encode(rows, said, settings.validation, seed, encoded, report)
    refuse_overlong(bench.policy, (row.samples for row in (*train, *held)), too_long("reward_model"))
    return train, held


def encode(
    renderer: Encoder, rows: Sequence[RankedRow], settings: RewardModelSection, name: str, tally: Tally
) -> list[Ranked]:
    """Rows as samples; those that cannot be used are counted in `tally`.

    Raises DataError where nothing is left of some rows, and for a missing margin under margin = "data".
    """
    budget, out = budget_of(settings), []
    for i, row in enumerate(rows):
        key = f"{name}-{i}"
        samples: tuple[TrainingSample, ...] | Dropped
        if isinstance(row, Ranking) and row.ranks and len(set(row.ranks)) == 1:
            tally.drop(Dropped("all completions equally good", key))
            continue
        with naming(row.prompt):
            if isinstance(row, Preference):
                samples = preference_samples(renderer, row, group_id=key, budget=budget, tally=tally)
            else:
                samples = ranking_samples(renderer, row, group_id=key, budget=budget, tally=tally)
        if not isinstance(samples, Dropped):
            out.append(_ranked(row, [replace(s, trajectory_id=key) for s in samples], settings, key))
    if rows and not out:
        raise DataError(f"none of the {len(rows)} {name} rows can be used; of all rows: {tally.text}")
    return out


def budget_of(settings: ScoringSection) -> Budget:
    """The token limits of a section."""
    return Budget(settings.max_prompt_tokens, settings.max_completion_tokens)


def _ranked(
    row: RankedRow, samples: Sequence[TrainingSample], settings: RewardModelSection, key: str
) -> Ranked:
    if isinstance(row, Preference):
        margin = settings.margin
        if margin == "data":
            if row.margin is None:
                raise DataError(
                    f"row {key} has no margin, and reward_model.margin is 'data'; give every row one (a "
                    'column "margin", or scores of both sides), or set a number such as margin = 0.0'
                )
            margin = row.margin
        return Ranked(tuple(samples), (0,), (1,), (margin,))
    ranks = row.ranks or tuple(range(len(samples)))
    pairs = [(i, j) for i in range(len(ranks)) for j in range(i + 1, len(ranks)) if ranks[i] < ranks[j]]
    if settings.margin == "data" and not row.scores:
        raise DataError(
            f"row {key} is a ranking without scores, and reward_model.margin is 'data'; set margin = 0.0"
        )
    margins = [
        row.scores[i] - row.scores[j] if settings.margin == "data" else float(settings.margin)
        for i, j in pairs
    ]
    better, worse = zip(*pairs, strict=True)
    return Ranked(tuple(samples), better, worse, tuple(margins))
