"""Are there rows on both sides of each split, and steps for the schedule? Asked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.records import Record, both_sides
from stepladder.data.files.split import split_by_content
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.policies.optimizer import warmup_then_linear
from stepladder.recipe.preference import PreferenceSection
from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.rungs.reward_model.scoring_files import read_ranked, read_steps


def check_preference_rows(settings: PreferenceSection, world: CheckedWorld | None, seed: int) -> None:
    """Of a file, or made by `world`. Raises DataError or ConfigError."""
    rows: Sequence[Record]
    if settings.data is not None:
        rows = read_dataset(settings.data, kind=settings.kind).records
        if len(rows) <= settings.validation:
            raise DataError(
                f"{settings.data} has {len(rows)} {'answers' if settings.loss == 'kto' else 'pairs'}, "
                f"preference.validation holds back {settings.validation}; try preference.validation = "
                f"{len(rows) // 5}"
            )
    else:
        assert world is not None
        pairs = world.preferences(settings.pairs, seed)
        rows = [side for pair in pairs for side in both_sides(pair)] if settings.loss == "kto" else pairs
    left = _trained("preference", rows, settings.validation, seed) if settings.validation else len(rows)
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


def check_scored_rows(
    settings: RewardModelSection | ProcessRewardModelSection, world: CheckedWorld | None, seed: int
) -> None:
    """Of a file, or made by `world`; labels that rollouts make are not there yet. Raises DataError."""
    ranked = isinstance(settings, RewardModelSection)
    section = "reward_model" if ranked else "process_reward_model"
    rows: Sequence[Record]
    if settings.data is not None:
        rows = (read_ranked if ranked else read_steps)(settings.data).records
        if len(rows) <= settings.validation:
            raise DataError(
                f"{section}.data has {len(rows)} rows, {section}.validation holds back {settings.validation}"
                f"; try {section}.validation = {len(rows) // 5}"
            )
    elif isinstance(settings, RewardModelSection):
        assert world is not None
        rows = world.preferences(settings.pairs, seed)
    elif settings.solutions:
        assert world is not None
        rows = world.step_solutions(settings.solutions, seed)
    else:
        return
    _trained(section, rows, settings.validation, seed)


def _trained(section: str, rows: Sequence[Record], validation: int, seed: int) -> int:
    """How many rows the split leaves to train on."""
    try:
        return len(split_by_content(rows, validation, seed)[0])
    except DataError as error:
        raise DataError(f"{section}.validation={validation}: {error}") from error
