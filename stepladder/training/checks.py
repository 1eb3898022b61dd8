"""What a recipe asks of its world and its files, asked before a model is loaded."""

from __future__ import annotations

from stepladder.config import Recipe
from stepladder.data.datasets import read_demonstrations
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.evaluation import require_tasks
from stepladder.sections.sft import SftSection


def check_world(recipe: Recipe, world: CheckedWorld) -> None:
    """Raise ConfigError or DataError for tasks, demonstrations or data that are not there."""
    e = recipe.evaluation
    require_tasks(world, e.split, max(e.tasks, e.raw))
    if e.few_shot and not world.demonstrates:
        raise ConfigError(
            f"evaluation.few_shot={e.few_shot} needs worked examples, but the environment "
            f"{recipe.environment.name!r} has no demonstrations(count, seed) method; add one, or set "
            "evaluation.few_shot = 0"
        )
    if recipe.rl is not None:
        require_tasks(world, "train", 1)
    if recipe.sft is not None:
        _check_demonstrations(recipe.sft, world, recipe.environment.name)


def _check_demonstrations(settings: SftSection, world: CheckedWorld, name: str) -> None:
    if settings.data is None:
        if not world.demonstrates:
            raise ConfigError(
                f"sft.demonstrations asks the environment {name!r} for demonstrations, but it has no "
                "demonstrations(count, seed) method; add one, or give sft.data"
            )
        return
    rows = len(read_demonstrations(settings.data))
    if rows <= settings.validation:
        raise DataError(
            f"{settings.data} has {rows} conversations, sft.validation holds back {settings.validation}; "
            f"try sft.validation = {rows // 5}"
        )
