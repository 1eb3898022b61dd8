"""Paths of a recipe made absolute, so that what a run records is found from any folder it is resumed in."""

from __future__ import annotations

from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from stepladder.errors import ConfigError
from stepladder.policies.bundled import BUNDLED
from stepladder.recipe.config import EvalRecipe, Recipe
from stepladder.recipe.preference import EARLIER_RUNG
from stepladder.workbench.model_rewards import names_model

R = TypeVar("R", Recipe, EvalRecipe)

_FILES = (  # always files, folders or globs
    ("sft", "data"),
    ("preference", "data"),
    ("reward_model", "data"),
    ("process_reward_model", "data"),
    ("distillation", "data"),
    ("engine", "python"),
    ("engine", "folder"),
)


def anchored(recipe: R) -> R:
    """The recipe with every relative path made absolute from the working folder.

    Bundled names, hub ids and import paths of modules stay as they are. Options of an environment are its
    own business, but for the worlds of a mixture.
    """
    made: R = _with(recipe, "model", name=model_path(recipe.model.name))
    for section, key in _FILES:
        value = getattr(getattr(made, section, None), key, None)
        if value is not None and (section, value) != ("preference", EARLIER_RUNG):
            made = _with(made, section, **{key: absolute(value)})
    if made.environment is not None:
        made = _with(
            made,
            "environment",
            name=import_path(made.environment.name),
            rewards=tuple(_reward(reward) for reward in made.environment.rewards),
            options=_options(made.environment.options),
        )
    if isinstance(made, Recipe):
        if made.distillation is not None:
            made = _with(made, "distillation", teacher=model_path(made.distillation.teacher))
        if made.rl is not None:
            own = {key: getattr(made.rl, key) for key in ("advantage", "loss")}
            made = _with(made, "rl", **{k: import_path(v) for k, v in own.items() if v is not None})
    return made


def named_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, path) of all that a recipe reads: models, data, folders of reward models, files of code.

    A glob is a path for each file that it finds. Names, such as a hub's, are there as they are.
    """
    made = anchored(recipe)
    found = [("model.name", made.model.name)]
    for section, key in _FILES:
        value = getattr(getattr(made, section, None), key, None)
        if value is not None and section != "engine" and (section, value) != ("preference", EARLIER_RUNG):
            found += [(f"{section}.{key}", path) for path in (value, *sorted(glob(value, recursive=True)))]
    if made.distillation is not None:
        found.append(("distillation.teacher", made.distillation.teacher))
    code = [("rl.advantage", made.rl.advantage), ("rl.loss", made.rl.loss)] if made.rl is not None else []
    if made.environment is not None:
        worlds = _options(made.environment.options).get("worlds")
        names = [made.environment.name, *(w.get("name") for w in worlds or [] if isinstance(w, dict))]
        code += [("environment.name", name) for name in names]
        for reward in made.environment.rewards:
            if names_model(reward):
                paths = reward.partition(":")[2].partition("?")[0].split(",")
                found += [("environment.rewards", path.strip()) for path in paths]
            else:
                code.append(("environment.rewards", reward))
    found += [(key, text.rpartition(":")[0]) for key, text in code if isinstance(text, str)]
    return [(key, path) for key, path in found if path]


def refuse_own_inputs(recipe: Recipe, folder: Path) -> None:
    """Raise ConfigError where the recipe reads something in `folder`, which is to be deleted."""
    homes = {folder.absolute(), folder.resolve()}
    for key, path in named_paths(recipe):
        own = Path(path).expanduser()
        places = (own.absolute(), own.resolve()) if own.exists() else ()  # else it is a name or a pattern
        inside = any(place.is_relative_to(home) for place in places for home in homes)
        if inside or (key.endswith(".data") and any(folder.resolve().is_relative_to(p) for p in places)):
            raise ConfigError(
                f"{key} = {path!r} {'lies in' if inside else 'holds'} the run folder {folder}, which "
                "overwrite would delete; copy it elsewhere, or choose another name, for example "
                f"run.name = '{folder.name}-2'"
            )


def absolute(path: str) -> str:
    """From the working folder; links and ".." are left alone, as is what a glob holds.

    >>> absolute("/data/*.jsonl")
    '/data/*.jsonl'
    """
    return str(Path(path).expanduser().absolute())


def import_path(text: str) -> str:
    """A "path/to/file.py:Name" made absolute; "package.module:Name" and bundled names are none.

    >>> import_path("stepladder.play.agent:Agents"), import_path("calculator")
    ('stepladder.play.agent:Agents', 'calculator')
    """
    file, colon, name = text.rpartition(":")
    return f"{absolute(file)}:{name}" if colon and file.endswith(".py") else text


def model_path(name: str) -> str:
    """A folder made absolute; what is no folder here is a name, such as a hub's.

    >>> model_path("tiny"), model_path("smollm2-135m-instruct")
    ('tiny', 'smollm2-135m-instruct')
    """
    if name in BUNDLED or name == "tiny" or not Path(name).expanduser().is_dir():
        return name
    return absolute(name)


def _reward(text: str) -> str:
    """A function's file, or the folders of "reward_model:PATH,PATH?options"."""
    if not names_model(text):
        return import_path(text)
    kind, _, rest = text.partition(":")
    paths, mark, query = rest.partition("?")
    return f"{kind}:{','.join(model_path(path.strip()) for path in paths.split(','))}{mark}{query}"


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a mixture name worlds, whose names are also the labels of their domains."""
    worlds = options.get("worlds")
    if not isinstance(worlds, list):
        return options
    return {**options, "worlds": [_world(entry) for entry in worlds]}


def _world(entry: Any) -> Any:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or import_path(name) == name:
        return entry
    return {**entry, "name": import_path(name), "label": entry.get("label", name)}


def _with(recipe: R, section: str, **values: Any) -> R:
    changed = getattr(recipe, section).model_copy(update=values)
    made: R = recipe.model_copy(update={section: changed})
    return made
