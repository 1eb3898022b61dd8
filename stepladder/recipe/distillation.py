"""The section of distillation: the policy learns from a teacher's probabilities."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import Names, OptimizerKeys, Refusals, RungSection


class DistillationSection(OptimizerKeys, RungSection):
    """A teacher, a second model with the same vocabulary, scores every token; the policy moves towards it."""

    label: ClassVar[str] = "after distillation"
    wish: ClassVar[str] = "[distillation] samples in an environment or asks it for demonstrations"

    teacher: Annotated[str, Names("model")] = Field(
        description="a run folder, a model folder, a bundled name or a hub id"
    )
    teacher_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="the type that the teacher computes in"
    )
    on_policy: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of steps in which the policy samples what is scored (lambda of GKD); in the "
        "others it is conversations from `data` or `demonstrations`",
    )
    data: Annotated[str | None, Names("file")] = Field(
        None, description="a file of conversations, such as a teacher's samples"
    )
    demonstrations: int = Field(0, ge=0, description="made by the environment, instead of `data`")
    loss: Literal["divergence", "sampled"] = Field(
        "divergence",
        description="divergence: over the whole vocabulary at each token; sampled: reverse KL estimated on "
        "the sampled tokens only, as an advantage, which costs no more than RL",
    )
    beta: float = Field(
        1.0,
        ge=0,
        le=1,
        description="of the generalised Jensen-Shannon divergence: 0 is KL(teacher | policy), 1 is "
        "KL(policy | teacher)",
    )
    steps: int = Field(50, ge=1, description="optimiser steps")
    tasks_per_step: int = Field(16, ge=1, description="tasks that are sampled for a step")
    samples: int = Field(1, ge=1, description="episodes of each of these tasks")
    batch_size: int = Field(16, ge=1, description="conversations of a step that is not on-policy")
    temperature: float | None = Field(None, gt=0, description="of sampling; unset: rollout.temperature")

    def wants_environment(self) -> str | None:
        """Return what is done in it: with conversations from a file it may still be sampled in."""
        if self.data is None:
            return self.wish
        return f"distillation.on_policy={self.on_policy:g} plays episodes" if self.on_policy > 0 else None

    refusals: ClassVar[Refusals] = {
        "on_policy={s.on_policy:g} leaves steps to conversations: give either data or demonstrations; got "
        "data={s.data!r} and demonstrations={s.demonstrations}": lambda s: s.on_policy < 1 and s.sources != 1,
        "on_policy=1 samples every step, so data and demonstrations mean nothing; leave them out, or set "
        "on_policy = 0.5": lambda s: s.on_policy == 1 and s.sources,
        "loss='sampled' estimates the divergence on the policy's own tokens, but on_policy is {s.on_policy:g}"
        "; set on_policy = 1, or loss = 'divergence'": lambda s: s.loss == "sampled" and s.on_policy < 1,
        "loss='sampled' is the reverse KL, so beta={s.beta:g} means nothing; leave it out, or set loss = "
        "'divergence'": lambda s: s.loss == "sampled" and s.beta != 1,
    }

    @property
    def sources(self) -> int:
        """How many sources of conversations are given."""
        return (self.data is not None) + (self.demonstrations > 0)
