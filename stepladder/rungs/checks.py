"""What a recipe asks of its world and its files, asked before a model is loaded."""

from __future__ import annotations

from stepladder.data.files.datasets import read_dataset
from stepladder.environments.environment import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.evaluation import require_tasks
from stepladder.plugins import load_object
from stepladder.recipe.config import Recipe
from stepladder.recipe.preference import EARLIER_RUNG
from stepladder.recipe.rl import RlSection
from stepladder.rungs.check_rows import check_preference_rows, check_scored_rows
from stepladder.rungs.sft_rows import file_rows, made_conversations
from stepladder.rungs.tasks import levels_of


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
    scored = recipe.rl is not None or recipe.rejection_sampling is not None
    if scored and not recipe.environment.rewards and not world.make().judges:
        raise ConfigError(
            f"the environment {recipe.environment.name!r} judges nothing, for it has no method `reward`: "
            "every episode would score 0; add reward(self, answer) -> float, or environment.rewards"
        )
    if recipe.rl is not None:
        require_tasks(world, "train", 1)
        _check_rl(recipe.rl, recipe.rollout.max_turns, world)
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
    if recipe.sft is not None and recipe.sft.data is None:
        if not world.demonstrates:
            raise ConfigError(
                f"sft.demonstrations asks the environment {recipe.environment.name!r} for demonstrations, "
                "but it has no demonstrations(count, seed) method; add one, or give sft.data"
            )
        made_conversations(world, recipe.sft, recipe.run.seed)
    if recipe.preference is not None and recipe.preference.data is None and not world.prefers:
        raise ConfigError(
            f"preference.pairs asks the environment {recipe.environment.name!r} for pairs, but it has no "
            "preferences(count, seed) method; add one, or give preference.data"
        )
    if recipe.reward_model is not None and recipe.reward_model.data is None and not world.prefers:
        raise ConfigError(
            f"reward_model.pairs asks the environment {recipe.environment.name!r} for pairs, but it has no "
            "preferences(count, seed) method; add one, or give reward_model.data"
        )
    process = recipe.process_reward_model
    if process is not None and process.solutions and not world.labels_steps:
        raise ConfigError(
            f"process_reward_model.solutions asks the environment {recipe.environment.name!r} for solutions, "
            "but it has no step_solutions(count, seed) method; add one, or set process_reward_model.tasks, "
            "whose labels are made by rollouts"
        )
    if process is not None and process.tasks:
        require_tasks(world, "train", process.tasks)
    _check_made_rows(recipe, world)


def _check_made_rows(recipe: Recipe, world: CheckedWorld) -> None:
    """Whether what the world makes suffices for the split and the schedule of each rung."""
    for scored in (recipe.reward_model, recipe.process_reward_model):
        if scored is not None and scored.data is None:
            check_scored_rows(scored, world, recipe.run.seed)
    if recipe.preference is not None and recipe.preference.data is None:
        check_preference_rows(recipe.preference, world, recipe.run.seed)


def check_data(recipe: Recipe) -> None:
    """Raise DataError or ConfigError for a training file that is not there, too small or of another kind."""
    for scored in (recipe.reward_model, recipe.process_reward_model):
        if scored is not None and scored.data is not None:
            check_scored_rows(scored, None, recipe.run.seed)
    if recipe.sft is not None and recipe.sft.data is not None:
        file_rows(recipe.sft, recipe.run.seed)
    if recipe.distillation is not None and recipe.distillation.data is not None:
        read_dataset(recipe.distillation.data, "demonstration")
    settings = recipe.preference
    if settings is not None and settings.data not in (None, EARLIER_RUNG):
        check_preference_rows(settings, None, recipe.run.seed)


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
