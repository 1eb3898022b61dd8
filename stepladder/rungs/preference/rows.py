"""Are there rows on both sides of the split, and steps for the schedule? Asked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.records import Record, both_sides
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.policies.optimizer import warmup_then_linear
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.rungs.requirements import require_maker, rows_left
from stepladder.workbench.sources import Sources


def check_rows(
    recipe: CommonRecipe, settings: PreferenceSection, world: CheckedWorld | None, sources: Sources
) -> None:
    """Check the rows of the file, or those that the world makes. Raises DataError or ConfigError."""
    if settings.data == EARLIER_RUNG:
        return
    rows: Sequence[Record]
    if settings.data is not None:
        rows = sources.once(read_dataset, Path(settings.data), settings.kind).records
        if len(rows) <= settings.validation:
            raise DataError(
                f"{settings.data} has {len(rows)} {'answers' if settings.loss == 'kto' else 'pairs'}, "
                f"preference.validation holds back {settings.validation}; try preference.validation = "
                f"{len(rows) // 5}"
            )
    else:
        assert world is not None
        require_maker(recipe, world.prefers, key="preference.pairs", what="pairs", method="preferences")
        pairs = sources.once(world.preferences, settings.pairs, recipe.run.seed)
        rows = [side for pair in pairs for side in both_sides(pair)] if settings.loss == "kto" else pairs
    left = len(rows)
    if settings.validation:
        left = rows_left("preference", rows, settings.validation, recipe.run.seed)
    check_schedule(settings, left)


def check_schedule(settings: PreferenceSection, rows: int) -> None:
    """Raise ConfigError where `rows` training rows give a linear schedule no step to fall in."""
    if settings.schedule != "linear":
        return
    batches, last = divmod(rows, settings.batch_size)
    # A last KTO answer without another to be compared with joins the batch before.
    batches += last > (settings.loss == "kto" and batches > 0)
    total = settings.epochs * batches
    try:
        warmup_then_linear(0, peak=settings.learning_rate, warmup=settings.warmup_steps, total=total)
    except ConfigError as error:
        raise ConfigError(
            f'preference.schedule="linear" has no room: preference.epochs={settings.epochs} of {rows} '
            f"training rows in batches of preference.batch_size={settings.batch_size} are {total} steps, and "
            f"preference.warmup_steps={settings.warmup_steps} of them warm up; try preference.epochs = "
            f"{max(1, settings.warmup_steps) // max(1, batches) + 1}, a smaller batch_size, or the "
            'schedule "constant"'
        ) from error
