"""The sections that every recipe has: run, model, environment, rollout."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from stepladder.recipe.section import Names, Refusals, Section


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

    @field_validator("name")
    @classmethod
    def _inside_out(cls, name: str) -> str:
        path = PurePath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError("the run's folder must lie under run.out; for example run.name = 'my-run'")
        return name


class LoraSection(Section):
    """A low-rank adapter instead of all weights (Hu et al. 2021, arXiv:2106.09685).

    It wants a higher `learning_rate` in every section that trains it: about ten times that of all weights
    ("LoRA Without Regret", J. Schulman, Thinking Machines Lab 2025).
    """

    rank: int = Field(16, ge=1, description="columns of the two low-rank factors")
    alpha: int = Field(32, gt=0, description="the adapter's output is multiplied by alpha / rank")
    targets: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description='names of the modules that get an adapter, such as ["q_proj", "v_proj"]'
    )


class ModelSection(Section):
    """The policy. `name`: a bundled name, a local folder, a hub id, or "tiny" (from scratch)."""

    name: Annotated[str, Names("model")] = Field(
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
    recompute_layers: bool = Field(
        False,
        description="activation checkpointing: an update keeps the inputs of layers alone and computes the "
        "rest again, which takes about a quarter longer",
    )
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

    name: Annotated[str, Names("code")] = Field(description="a bundled environment, or an import path")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the world or class; for a class with @tool methods also "
        "tool_deadline, max_output_chars and max_calls_per_turn",
    )
    rewards: tuple[str, ...] = Field(
        (),
        description="import paths of reward functions, added to its own; or reward models, "
        '"reward_model:PATH"',
    )


class RolloutSection(Section):
    """Limits of an episode, the same in training and evaluation."""

    max_turns: int = Field(8, ge=1, description="model calls an episode")
    max_tokens: int = Field(256, ge=1, description="sampled tokens a turn")
    max_context: int = Field(2048, ge=16, description="tokens of prompt and turns together")
    max_observation_tokens: int = Field(512, ge=8, description="longer tool output is cut, with a mark")
    temperature: float = Field(1.0, gt=0, description="of training rollouts")
    concurrency: int = Field(256, ge=1, description="episodes at the same time")
    deadline: float = Field(60.0, gt=0, description="seconds each of reset, step and close may take")

    refusals: ClassVar[Refusals] = {
        "rollout.max_tokens={s.max_tokens} leaves no room for a prompt in rollout.max_context="
        "{s.max_context}; try max_context = {s.roomy}": lambda s: s.max_tokens >= s.max_context,
    }

    @property
    def roomy(self) -> int:
        """A `max_context` with room for a prompt."""
        return self.max_tokens * 4
