"""The recipe: one TOML file, closed and typed, with dotted overrides from the command line.

Every unknown key is refused with the nearest name, before a model is loaded. Cross-checks that need
more than one section stand in `Recipe.check`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, Field, ValidationError

from stepladder.errors import ConfigError, nearest
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.distillation import DistillationSection
from stepladder.recipe.evaluation import EvaluationSection
from stepladder.recipe.moved import moved, moved_keys
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.recipe.rejection_sampling import RejectionSamplingSection
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.recipe.rl import RlSection
from stepladder.recipe.run import EnvironmentSection
from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import Refusals, RungSection
from stepladder.recipe.sft import SftSection


class EvalRecipe(CommonRecipe):
    """What playing episodes takes, without any training: the part that `eval`, `chat` and runs share."""

    environment: EnvironmentSection


class Recipe(CommonRecipe):
    """A whole run: which model, in which world, up which rungs."""

    description: str = Field("", description="one line, shown by `stepladder recipes`")
    sft: SftSection | None = None
    distillation: DistillationSection | None = None
    rejection_sampling: RejectionSamplingSection | None = None
    preference: PreferenceSection | None = None
    reward_model: RewardModelSection | None = None
    process_reward_model: ProcessRewardModelSection | None = None
    rl: RlSection | None = None
    evaluation: EvaluationSection = EvaluationSection()

    refusals: ClassVar[Refusals] = {
        "the recipe trains nothing: add an [sft] or an [rl] section, or use `eval`": lambda s: all(
            getattr(s, rung) is None for rung in rung_sections()
        ),
        '{s.wish}, and there is none: add a section [environment] with name = "calculator"': lambda s: (
            s.environment is None and s.wish
        ),
        "rl.off_policy.max_staleness={s.rl.off_policy.max_staleness} plays while it trains, so what a "
        "token is sampled with depends on timing; and run.exact = true promises that it does not; set "
        "run.exact = false, or rl.off_policy.max_staleness = 0": lambda s: (
            s.rl and s.rl.off_policy.max_staleness and s.run.exact
        ),
        "rl.replay.weight={s.rl.replay.weight:g} mixes the demonstrations of [sft] into RL, and the "
        "recipe has no [sft]; add one, or set rl.replay.weight = 0": lambda s: (
            s.rl and s.rl.replay.weight and s.sft is None
        ),
        "sft.epochs=0 keeps the rows of [sft] for rl.replay alone, and nothing replays them; set "
        "rl.replay.weight = 0.1, or sft.epochs = 10": lambda s: (
            s.sft and not s.sft.epochs and not (s.rl and s.rl.replay.weight)
        ),
        "preference.data={s.preference.data!r} takes the pairs that this rung wrote, and the recipe has "
        "no section [{s.preference.data}]; add one, or give a file or preference.pairs": lambda s: (
            s.preference and s.preference.data == EARLIER_RUNG and getattr(s, EARLIER_RUNG) is None
        ),
        'preference.reference="base" is the model without its adapter, and there is no adapter; add a '
        'section [model.lora], or write preference.reference = "start"': lambda s: (
            s.preference and s.preference.reference == "base" and s.model.lora is None
        ),
        "model.train_embeddings=false says nothing with a LoRA adapter, which never trains the "
        "embeddings; leave it out": lambda s: s.model.lora is not None and not s.model.train_embeddings,
        "model.options sizes the tiny model, but model.name is {s.model.name!r}; set model.name = "
        '"tiny" or remove the options': lambda s: s.model.options and s.model.name != "tiny",
    }

    @property
    def wish(self) -> str | None:
        """What the first rung that needs an environment does with it, or None if no rung does."""
        sections = (getattr(self, rung) for rung in rung_sections())
        wishes = (section.wants_environment() for section in sections if section is not None)
        return next((wish for wish in wishes if wish), None)


def rung_sections() -> dict[str, type[RungSection]]:
    """Return the section of each rung by its name, in the order in which the rungs are climbed."""
    kinds = ((name, get_args(field.annotation)) for name, field in Recipe.model_fields.items())
    return {name: args[0] for name, args in kinds if args and issubclass(args[0], RungSection)}


def scoring_kinds() -> dict[str, str]:
    """Return what the models of each rung that trains scores do, "outcome" or "process", by its name."""
    return {name: of.kind for name, of in rung_sections().items() if issubclass(of, ScoringSection)}


def load_recipe(source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe (a bundled name, a TOML file or a dictionary), then apply `a.b=value` overrides.

    Raises ConfigError naming the key, the value received and the nearest known name.
    """
    if isinstance(source, dict):
        data = source
    else:
        path = find_recipe(str(source))
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    return parse_recipe(_overridden(data, overrides))


def eval_recipe(data: dict[str, Any], overrides: Sequence[str] = ()) -> EvalRecipe:
    """An `EvalRecipe` from a dictionary and overrides; raises ConfigError like `load_recipe`."""
    try:
        return EvalRecipe.model_validate(_overridden(data, overrides, "rollout.max_turns=4"))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e, EvalRecipe) for e in error.errors())) from None


def environment_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Options of an environment from the command line, `key=value` each; raises ConfigError for other text.

    >>> environment_options(["digits=3", "plain=false", "name=shop"])
    {'digits': 3, 'plain': False, 'name': 'shop'}
    """
    return _overridden({}, overrides, "digits=3")


def _overridden(
    data: dict[str, Any], overrides: Sequence[str], example: str = "rl.steps=20"
) -> dict[str, Any]:
    _refuse_moved(data)
    data = _copy(data)
    for override in overrides:
        _override(data, override, example)
    return data


def bundled_recipes() -> dict[str, Path]:
    """The recipes that ship with the package, by name."""
    folder = Path(__file__).parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe: an existing path, or a bundled name."""
    path = Path(name)
    if path.is_file():
        return path
    bundled = bundled_recipes()
    if name in bundled:
        return bundled[name]
    raise ConfigError(
        f"there is no recipe {name!r}: no such file, and no bundled recipe of that name."
        f"{nearest(name, bundled)} Bundled: {', '.join(bundled)}"
    )


def parse_recipe(data: dict[str, Any]) -> Recipe:
    """Validate; turn pydantic's list of errors into sentences."""
    _refuse_moved(data)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e, Recipe) for e in error.errors())) from None


def _refuse_moved(data: dict[str, Any]) -> None:
    sentences = list(moved_keys(data))
    if sentences:
        raise ConfigError("\n".join(sentences))


def _sentence(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known_keys(model, error["loc"][:-1])
        key = str(error["loc"][-1])
        hint = nearest(key, known)
        return f"unknown key {where!r} (value {error['input']!r}).{hint} Known here: {', '.join(known)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {message}; got {error['input']!r}"


def _known_keys(model: Any, location: tuple[Any, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):  # of a list of tables
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return sorted(model.model_fields)


def _override(data: dict[str, Any], text: str, example: str) -> None:
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override looks like {example}; got {text!r}")
    value = _value(raw)
    sentence = moved(key.strip(), value)
    if sentence is not None:
        raise ConfigError(sentence)
    *parents, last = key.strip().split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key!r} goes through {parent!r}, which is a value, not a section")
        data = child
    if value is None:
        data.pop(last, None)
    else:
        data[last] = value


def _value(raw: str) -> Any:
    """Return an override's value: TOML, or else the text as it is; None for null ("none" is a word)."""
    if raw.strip() == "null":
        return None
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw.strip()


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value
