"""The recipe: one TOML file, closed and typed, with dotted overrides from the command line.

Every unknown key is refused with the nearest name, before a model is loaded. Cross-checks that need
more than one section stand in `Recipe.check`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from stepladder.errors import ConfigError, nearest
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.distillation import DistillationSection
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.recipe.rejection_sampling import RejectionSamplingSection
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.recipe.rl import RlSection
from stepladder.recipe.run import EnvironmentSection, EvaluationSection
from stepladder.recipe.scoring import ScoringSection
from stepladder.recipe.section import RungSection
from stepladder.recipe.sft import SftSection

PLAYING = ("rejection_sampling", "rl")  # what needs an environment


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

    @model_validator(mode="after")
    def check_rungs(self) -> Recipe:
        """What no single section can see."""
        if all(getattr(self, rung) is None for rung in rung_sections()):
            raise ValueError("the recipe trains nothing: add an [sft] or an [rl] section, or use `eval`")
        if self.environment is None:
            self._refuse_missing_environment()
        if self.rl is not None and self.rl.max_staleness and self.run.exact:
            raise ValueError(
                f"rl.max_staleness={self.rl.max_staleness} plays while it trains, so what a token is sampled "
                "with depends on timing; and run.exact = true promises that it does not; set run.exact = "
                "false, or rl.max_staleness = 0"
            )
        if self.rl is not None and self.rl.replay and self.sft is None:
            raise ValueError(
                f"rl.replay={self.rl.replay:g} mixes the demonstrations of [sft] into RL, and the recipe has "
                "no [sft]; add one, or set rl.replay = 0"
            )
        if self.sft is not None and not self.sft.epochs and not (self.rl and self.rl.replay):
            raise ValueError(
                "sft.epochs=0 keeps the rows of [sft] for rl.replay alone, and nothing replays them; set "
                "rl.replay = 0.1, or sft.epochs = 10"
            )
        if self.preference is not None:
            self._check_preference(self.preference)
        if self.rollout.max_tokens >= self.rollout.max_context:
            raise ValueError(
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"rollout.max_context={self.rollout.max_context}; try max_context = "
                f"{self.rollout.max_tokens * 4}"
            )
        if self.model.lora is not None and not self.model.train_embeddings:
            raise ValueError(
                "model.train_embeddings=false says nothing with a LoRA adapter, which never trains the "
                "embeddings; leave it out"
            )
        if self.model.options and self.model.name != "tiny":
            raise ValueError(
                f"model.options sizes the tiny model, but model.name is {self.model.name!r}; set "
                'model.name = "tiny" or remove the options'
            )
        return self

    def _check_preference(self, settings: PreferenceSection) -> None:
        """Where its pairs and its reference come from must be in the recipe."""
        if settings.data == EARLIER_RUNG and getattr(self, EARLIER_RUNG, None) is None:
            raise ValueError(
                f"preference.data={EARLIER_RUNG!r} takes the pairs that this rung wrote, and the recipe has "
                f"no section [{EARLIER_RUNG}]; add one, or give a file or preference.pairs"
            )
        if settings.reference == "base" and self.model.lora is None:
            raise ValueError(
                'preference.reference="base" is the model without its adapter, and there is no adapter; add '
                'a section [model.lora], or write preference.reference = "start"'
            )

    def _refuse_missing_environment(self) -> None:
        """A recipe without a world trains on files alone."""
        players = [name for name in PLAYING if getattr(self, name) is not None]
        if players:
            wants = f"[{players[0]}] plays episodes"
        elif self.distillation is not None and self.distillation.data is None:
            wants = "[distillation] samples in an environment or asks it for demonstrations"
        elif self.distillation is not None and self.distillation.on_policy > 0:
            wants = f"distillation.on_policy={self.distillation.on_policy:g} plays episodes"
        elif self.sft is not None and self.sft.data is None:
            wants = f"sft.demonstrations={self.sft.demonstrations} asks an environment for demonstrations"
        elif self.preference is not None and self.preference.data is None:
            wants = f"preference.pairs={self.preference.pairs} asks an environment for pairs"
        elif self.reward_model is not None and self.reward_model.data is None:
            wants = f"reward_model.pairs={self.reward_model.pairs} asks an environment for pairs"
        elif self.process_reward_model is not None and self.process_reward_model.data is None:
            wants = "process_reward_model without data asks an environment for solutions or tasks"
        else:
            return
        raise ValueError(f'{wants}, and there is none: add a section [environment] with name = "calculator"')


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
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e, Recipe) for e in error.errors())) from None


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
    *parents, last = key.strip().split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key!r} goes through {parent!r}, which is a value, not a section")
        data = child
    if raw.strip() == "null":  # "none" is a value of several keys
        data.pop(last, None)
        return
    try:
        data[last] = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        data[last] = raw.strip()


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return value
