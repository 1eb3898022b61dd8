"""What rungs ask of their data and their world before a model is loaded: rows to split, makers, a judge."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.files.records import Record
from stepladder.data.files.split import split_by_content
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.recipe.common import CommonRecipe


def require_maker(
    recipe: CommonRecipe,
    there: bool,
    *,
    key: str,
    what: str,
    method: str,
    instead: str = "add one, or give {data}",
) -> None:
    """Raise ConfigError where the world makes no such rows as `key` asks for; `instead` says what works."""
    if there:
        return
    assert recipe.environment is not None
    remedy = instead.format(data=key.partition(".")[0] + ".data")
    raise ConfigError(
        f"{key} asks the environment {recipe.environment.name!r} for {what}, but it has no "
        f"{method}(count, seed) method; {remedy}"
    )


def require_judge(recipe: CommonRecipe, world: CheckedWorld) -> None:
    """Raise ConfigError where nothing judges an episode: every one of them would score 0."""
    assert recipe.environment is not None
    if recipe.environment.rewards or world.make().judges:
        return
    raise ConfigError(
        f"the environment {recipe.environment.name!r} judges nothing, for it has no method `reward`: every "
        "episode would score 0; add reward(self, answer) -> float, or environment.rewards"
    )


def rows_left(section: str, rows: Sequence[Record], validation: int, seed: int) -> int:
    """Return how many rows the split leaves to train on. Raises DataError where a side is empty."""
    try:
        return len(split_by_content(rows, validation, seed)[0])
    except DataError as error:
        raise DataError(f"{section}.validation={validation}: {error}") from error
