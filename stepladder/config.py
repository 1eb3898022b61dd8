"""The recipe: one TOML file, closed and typed, with dotted overrides from the command line.

Every unknown key is refused with the nearest name, before a model is loaded. Cross-checks that need
more than one section stand in `Recipe.check`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.errors import ConfigError, nearest


class Section(BaseModel):
    """Closed and immutable: a key that is not listed is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Where the run goes and what makes it repeatable."""

    name: str = Field("run", description="the folder under `out` that the run fills")
    out: str = Field("runs", description="where run folders go")
    seed: int = Field(0, ge=0, description="every random choice of the run follows from it")
    exact: bool = Field(
        True,
        description="deterministic admission order, so that a resumed run repeats bit for bit; set it to "
        "false for slow tools, so that the engine does not wait for them",
    )
    threads: int = Field(0, ge=0, description="torch threads; 0: one a core")
    checkpoint_every: int = Field(
        10, ge=1, description="RL steps between checkpoints; in SFT, about a minute, after an epoch"
    )
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest checkpoints stay")
    track: Literal["none", "tensorboard", "wandb", "trackio"] = Field(
        "none", description="where metrics go besides metrics.jsonl"
    )


class LoraSection(Section):
    """A low-rank adapter instead of all weights (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(16, ge=1, description="columns of the two low-rank factors")
    alpha: int = Field(32, gt=0, description="the adapter's output is multiplied by alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description='names of the modules that get an adapter, such as ["q_proj", "v_proj"]'
    )


class ModelSection(Section):
    """The policy. `name`: a bundled name, a local folder, a hub id, or "tiny" (from scratch)."""

    name: str = Field(
        "smollm2-135m-instruct", description='a bundled name, a local folder, a hub id, or "tiny"'
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="the type that engine and trainer compute in; auto: bfloat16 where the hardware has it "
        "(the tiny model: float32); master weights are float32 in any case",
    )
    device: str = Field(
        "auto", description="cpu, cuda, cuda:N or mps; auto: the first of cuda, mps, cpu that is there"
    )
    train_embeddings: bool = Field(True, description="false saves a third of a small model's update")
    lora: LoraSection | None = Field(
        None, description="a section of its own, [model.lora]; without it all weights are trained"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="of the tiny model: symbols (its alphabet), hidden, layers, heads, kv_heads, "
        "intermediate, max_positions, arch",
    )


class EnvironmentSection(Section):
    """The world: a name, or an import path such as "my_module:MyWorld" or "file.py:MyWorld"."""

    name: str = Field(description="a bundled environment, or an import path")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the world or class; for a class with @tool methods also "
        "tool_deadline, max_output_chars and max_calls_per_turn",
    )
    rewards: tuple[str, ...] = Field((), description="import paths of reward functions, added to its own")


class RolloutSection(Section):
    """Limits of an episode, the same in training and evaluation."""

    max_turns: int = Field(8, ge=1, description="model calls an episode")
    max_tokens: int = Field(256, ge=1, description="sampled tokens a turn")
    max_context: int = Field(2048, ge=16, description="tokens of prompt and turns together")
    max_observation_tokens: int = Field(512, ge=8, description="longer tool output is cut, with a mark")
    temperature: float = Field(1.0, gt=0, description="of training rollouts")
    concurrency: int = Field(256, ge=1, description="episodes at the same time")
    deadline: float = Field(60.0, gt=0, description="seconds each of reset, step and close may take")


class SftSection(Section):
    """Supervised fine-tuning on demonstrations, until the validation loss stops falling."""

    demonstrations: int = Field(0, ge=0, description="made by the environment; 0 with `data`")
    data: str | None = Field(None, description="a JSONL file of conversations")
    train: Literal["assistant", "last_turn", "full"] = Field(
        "assistant",
        description="what is imitated: every assistant turn, the last one only, or every token of the "
        "conversation",
    )
    epochs: int = Field(10, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(8, ge=1, description="samples per optimiser step")
    learning_rate: float = Field(3e-5, gt=0, description="of AdamW, constant after the warm-up")
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    validation: int = Field(16, ge=0, description="demonstrations held out; 0: no early stop")
    patience: int = Field(1, ge=1, description="epochs without a better validation loss before the stop")
    min_improvement: float = Field(
        0.005, ge=0, description="a validation loss is better when it is lower by this many nats a token"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    max_minutes: float | None = Field(None, gt=0, description="no new epoch begins after this time")

    @model_validator(mode="after")
    def _one_source(self) -> SftSection:
        if (self.data is None) == (self.demonstrations == 0):
            raise ValueError(
                f"give either sft.data or sft.demonstrations; got data={self.data!r} and "
                f"demonstrations={self.demonstrations}. Try demonstrations=32"
            )
        return self


class RlSection(Section):
    """Reinforcement learning: `tasks_per_step` groups of `group_size` episodes, then an update."""

    algorithm: str = Field("grpo", description="a row of stepladder/algorithms.py")
    steps: int = Field(50, ge=1, description="batches of rollouts, each followed by its updates")
    tasks_per_step: int = Field(8, ge=1, description="groups per step, one task each")
    group_size: int = Field(8, ge=2, description="episodes of the same task")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW, constant after the warm-up")
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    updates_per_batch: int = Field(1, ge=1, description="optimiser steps on one batch of rollouts")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    aggregation: (
        Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"] | None
    ) = Field(None, description="instead of the algorithm's own")
    scale: Literal["group_std", "batch_std", "none"] | None = Field(
        None, description="what advantages are divided by, instead of the algorithm's own"
    )
    clip_low: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    clip_high: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    kl_coefficient: float | None = Field(
        None,
        ge=0,
        description="of the KL term that holds the policy near the one RL began with, instead of the "
        "algorithm's own; 0 saves the reference model",
    )
    correction: Literal["auto", "none", "token_cap", "token_mask"] = Field(
        "auto", description="for an engine that samples from slightly other numbers (bf16): token_cap"
    )
    sampling: Literal["uniform", "adaptive"] = Field(
        "uniform", description="adaptive: domains by p(1-p) of their moving success, with a floor"
    )
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only the end")
    stop_at_success: float | None = Field(
        None, gt=0, le=1, description="end when the mean training success of the last 5 steps reaches it"
    )
    max_minutes: float | None = Field(
        None, gt=0, description="no new step begins after this time in steps (evaluations not counted)"
    )

    @model_validator(mode="after")
    def _known(self) -> RlSection:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no algorithm {self.algorithm!r}.{nearest(self.algorithm, ALGORITHMS)} "
                f"Known: {', '.join(ALGORITHMS)}"
            )
        self.row()
        return self

    def row(self) -> Algorithm:
        """The algorithm's row with this recipe's overrides."""
        import dataclasses

        row = ALGORITHMS[self.algorithm]
        changes: dict[str, Any] = {}
        for key in ("aggregation", "scale", "clip_low", "clip_high"):
            if getattr(self, key) is not None:
                changes[key] = getattr(self, key)
        if self.kl_coefficient is not None:
            changes["kl_coefficient"] = self.kl_coefficient
            if self.kl_coefficient == 0:
                changes["kl_in"] = "none"
            elif row.kl_in == "none":
                changes["kl_in"] = "loss"
        if row.surrogate == "reinforce" and (self.clip_low is not None or self.clip_high is not None):
            raise ValueError(
                f"{row.name!r} has no ratio to clip, so clip_low={self.clip_low} and "
                f"clip_high={self.clip_high} mean nothing; leave them out, or use algorithm = 'grpo'"
            )
        if row.advantage != "group" and self.scale is not None:
            raise ValueError(
                f"{row.name!r} takes rewards against a fixed baseline, so scale={self.scale!r} means "
                "nothing; leave it out, or use algorithm = 'grpo'"
            )
        row = dataclasses.replace(row, **changes)
        if row.needs_critic or row.advantage not in ("group", "constant") or row.kl_in == "reward":
            raise ValueError(
                f"{row.name!r} needs a critic, batch whitening or a KL term in the reward, which this loop "
                "does not have yet; try algorithm = 'grpo', 'dr_grpo', 'dapo', 'gspo' or 'cispo'"
            )
        return row


class EvaluationSection(Section):
    """Held-out evaluation: before the first rung, after each rung."""

    split: str = Field("test", description="where held-out tasks come from")
    tasks: int = Field(200, ge=1, description="how many, the first of the split")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    raw: int = Field(100, ge=0, description="tasks for the untrained model; 0 skips it")
    few_shot: int = Field(0, ge=0, description="worked examples in the prompt of a second raw evaluation")
    examples: int = Field(4, ge=0, description="trajectories kept for the report")


class EvalRecipe(Section):
    """What playing episodes takes, without any training: the part that `eval`, `chat` and runs share."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection
    rollout: RolloutSection = RolloutSection()


class Recipe(Section):
    """A whole run: which model, in which world, up which rungs."""

    description: str = Field("", description="one line, shown by `stepladder recipes`")
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection
    rollout: RolloutSection = RolloutSection()
    sft: SftSection | None = None
    rl: RlSection | None = None
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def check(self) -> Recipe:
        """What no single section can see."""
        if self.sft is None and self.rl is None:
            raise ValueError("the recipe trains nothing: add an [sft] or an [rl] section, or use `eval`")
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
    folder = Path(__file__).parent / "recipes"
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
