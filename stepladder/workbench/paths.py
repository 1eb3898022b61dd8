"""Paths of a recipe made absolute, so that what a run records is found from any folder it is resumed in."""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

from stepladder.errors import ConfigError
from stepladder.policies.bundled import BUNDLED
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.config import Recipe
from stepladder.recipe.section import Names, Section
from stepladder.workbench.model_rewards import names_model

R = TypeVar("R", bound=CommonRecipe)
S = TypeVar("S", bound=Section)


def anchored(recipe: R) -> R:
    """Return the recipe with every relative path made absolute from the working folder.

    Bundled names, hub ids and import paths of modules stay as they are. Options of an environment are its
    own business, but for the worlds of a mixture.
    """
    made = _anchored(recipe)
    if made.environment is None:
        return made
    e = made.environment
    changes = {"rewards": tuple(map(_reward, e.rewards)), "options": _options(e.options)}
    return made.model_copy(update={"environment": e.model_copy(update=changes)})


def _anchored(section: S) -> S:
    """Make the marked keys of a section absolute, and those of the sections in it."""
    changes: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        marks = [mark for mark in field.metadata if isinstance(mark, Names)]
        if isinstance(value, Section):
            changes[key] = _anchored(value)
        elif marks and value is not None and value not in marks[0].but:
            changes[key] = _ABSOLUTE[marks[0].kind](value)
    return section.model_copy(update=changes)


def _marked(section: Section, prefix: str = "") -> Iterator[tuple[str, Names, str]]:
    """(dotted key, its mark, the value) of all that the marked keys of a section name."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from _marked(value, f"{prefix}{key}.")
        for mark in field.metadata:
            if isinstance(mark, Names) and value is not None and value not in mark.but:
                yield prefix + key, mark, value


def named_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, path) of all that a recipe reads: models, data, folders of reward models, files of code.

    A glob is a path for each file that it finds. Names, such as a hub's, are there as they are. The programs
    of an engine are not read.
    """
    made = anchored(recipe)
    found: list[tuple[str, str]] = []
    code: list[tuple[str, Any]] = []
    for key, mark, value in _marked(made):
        if mark.kind == "code":
            code.append((key, value))
        elif not key.startswith("engine."):
            files = sorted(glob(value, recursive=True)) if mark.kind == "file" else []
            found += [(key, path) for path in (value, *files)]
    if made.environment is not None:
        worlds = _options(made.environment.options).get("worlds")
        code += [("environment.name", w.get("name")) for w in worlds or [] if isinstance(w, dict)]
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


_ABSOLUTE = {"file": absolute, "model": model_path, "code": import_path}
