"""What a recipe asks of its world and its files, asked before a model is loaded."""

from __future__ import annotations

from stepladder.config import Recipe
from stepladder.data.datasets import read_demonstrations
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.evaluation import require_tasks
from stepladder.plugins import load_object
from stepladder.sections.rl import RlSection
from stepladder.sections.sft import SftSection
from stepladder.training.tasks import levels_of


def check_world(recipe: Recipe, world: CheckedWorld) -> None:
    """Raise ConfigError or DataError for tasks or demonstrations that are not there."""
    assert recipe.environment is not None
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
        _check_rl(recipe.rl, recipe.rollout.max_turns, world)
    if recipe.sft is not None and recipe.sft.data is None and not world.demonstrates:
        raise ConfigError(
            f"sft.demonstrations asks the environment {recipe.environment.name!r} for demonstrations, but it "
            "has no demonstrations(count, seed) method; add one, or give sft.data"
        )


def check_data(recipe: Recipe) -> None:
    """Raise DataError for a training file that is not there, or too small."""
    if recipe.sft is not None and recipe.sft.data is not None:
        _check_demonstrations(recipe.sft, recipe.sft.data)


def _check_demonstrations(settings: SftSection, path: str) -> None:
    rows = len(read_demonstrations(path))
    if rows <= settings.validation:
        raise DataError(
            f"{path} has {rows} conversations, sft.validation holds back {settings.validation}; "
            f"try sft.validation = {rows // 5}"
        )


def _check_rl(settings: RlSection, max_turns: int, world: CheckedWorld) -> None:
    """Own functions that are not there, a horizon without room, a curriculum without levels: ConfigError."""
    for key in ("advantage", "loss"):
        path = getattr(settings, key)
        if path is not None and not callable(load_object(path, what=f"rl.{key}")):
            raise ConfigError(f"rl.{key} = {path!r} is no function; give the path of one")
    if settings.horizon_start is not None and settings.horizon_start > max_turns:
        raise ConfigError(
            f"rl.horizon_start={settings.horizon_start} is beyond rollout.max_turns={max_turns}, to which "
            f"the horizon grows; try horizon_start = {max(1, max_turns // 2)}"
        )
    if settings.sampling == "curriculum":
        levels_of(world, "train")
