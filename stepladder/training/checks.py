"""What a recipe asks of its world and its files, asked before a model is loaded."""

from __future__ import annotations

from stepladder.config import Recipe
from stepladder.data.datasets import read_dataset
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.evaluation import require_tasks
from stepladder.training.sft_rows import file_rows


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
    sampling = recipe.rejection_sampling
    if sampling is not None and sampling.tasks > world.count("train"):
        raise ConfigError(
            f"rejection_sampling.tasks={sampling.tasks} a round, but the split 'train' has "
            f"{world.count('train')}; set rejection_sampling.tasks = {world.count('train')}, and more samples"
        )
    teaching = recipe.distillation
    if teaching is not None and teaching.demonstrations and not world.demonstrates:
        raise ConfigError(
            f"distillation.demonstrations asks the environment {recipe.environment.name!r} for "
            "demonstrations, but it has no demonstrations(count, seed) method; give distillation.data"
        )
    if recipe.sft is not None and recipe.sft.data is None and not world.demonstrates:
        raise ConfigError(
            f"sft.demonstrations asks the environment {recipe.environment.name!r} for demonstrations, but it "
            "has no demonstrations(count, seed) method; add one, or give sft.data"
        )


def check_data(recipe: Recipe) -> None:
    """Raise DataError or ConfigError for a training file that is not there, too small or of another kind."""
    if recipe.sft is not None and recipe.sft.data is not None:
        file_rows(recipe.sft, recipe.run.seed)
    if recipe.distillation is not None and recipe.distillation.data is not None:
        read_dataset(recipe.distillation.data, "demonstration")
