"""The section of reinforcement learning."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.errors import nearest
from stepladder.recipe.rl_checks import check_row, with_kl
from stepladder.recipe.rl_parts import BonusSection, CriticSection
from stepladder.recipe.section import Names, RungSection


class RlSection(RungSection):
    """Reinforcement learning: `tasks_per_step` groups of `group_size` episodes, then an update."""

    label: ClassVar[str] = "after RL"
    writes: ClassVar[tuple[str, ...]] = ("reference.safetensors",)

    algorithm: str = Field("grpo", description="a row of stepladder/algorithms.py")
    steps: int = Field(50, ge=1, description="batches of rollouts, each followed by its updates")
    tasks_per_step: int = Field(8, ge=1, description="groups per step, one task each")
    group_size: int = Field(8, ge=1, description="episodes of the same task")
    learning_rate: float = Field(
        1e-5, gt=0, allow_inf_nan=False, description="of AdamW, constant after the warm-up"
    )
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    updates_per_batch: int = Field(1, ge=1, description="optimiser steps on one batch of rollouts")
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    # -- instead of the algorithm's own
    aggregation: (
        Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"] | None
    ) = Field(None, description="instead of the algorithm's own")
    sequence: Literal["trajectory", "turn"] | None = Field(
        None,
        description="what one sequence is for ratios, lengths and denominators, instead of the "
        "algorithm's own",
    )
    scale: Literal["group_std", "batch_std", "none"] | None = Field(
        None, description="what advantages are divided by, instead of the algorithm's own"
    )
    whiten: bool | None = Field(
        None, description="token advantages to mean 0 and deviation 1 over the batch, last of all"
    )
    clip_low: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    clip_high: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    clip_absolute: bool | None = Field(None, description="of cispo: clip_high is the cap itself")
    dual_clip: float | None = Field(None, gt=1, description="bound on ratio times a negative advantage")
    advantage: Annotated[str | None, Names("code")] = Field(
        None, description="your own, by import path: fn(rewards, group_index, trajectories); [rl](rl.md)"
    )
    loss: Annotated[str | None, Names("code")] = Field(
        None,
        description="your own, by import path: fn(logprobs, proximal, advantages, mask); [rl](rl.md)",
    )
    # -- distance and entropy
    kl_coefficient: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="of the KL term that holds the policy near its reference, instead of the algorithm's "
        "own; 0 saves the reference model",
    )
    kl_in: Literal["loss", "reward"] | None = Field(
        None, description="where the KL term stands, instead of the algorithm's own: one place, never both"
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="k1 in the reward; in the loss k2 (the true reverse KL) or k3 (GRPO's)"
    )
    kl_target: float | None = Field(
        None, gt=0, description="nats an episode; the coefficient in the reward moves towards it"
    )
    kl_horizon: int = Field(10_000, ge=1, description="episodes over which that coefficient adapts")
    reference_every: int = Field(
        0, ge=0, description="steps after which the reference becomes the policy of then; 0: never"
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="of the entropy bonus in the loss"
    )
    entropy_target: float | None = Field(
        None, gt=0, description="nats a token; the bonus grows below it and is off above it"
    )
    entropy_step: float = Field(0.005, gt=0, description="by how much that bonus moves at each step")
    correction: Literal["auto", "none", "token_cap", "token_mask", "behaviour"] = Field(
        "auto",
        description="for tokens that another policy sampled (bf16, or max_staleness). token_cap: each "
        "weighed by proximal / behaviour, at most 2 (truncated importance sampling; with a clip, the "
        "decoupled objective); token_mask: those outside 0.5 to 2 dropped (IcePop); behaviour: clipped "
        "against the sampler itself (PPO as in the paper); auto: token_cap where it is needed",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="updates that a token may be old when it is trained on. 0: synchronous; from 1 on, "
        "episodes are played while the policy is trained",
    )
    replay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the SFT loss of the demonstrations of [sft] in every update: holds what RL "
        "would unlearn",
    )
    replay_batch: int = Field(8, ge=1, description="demonstrations in an update, with `replay`")
    # -- credit
    credit: Literal["outcome", "turns", "process", "gigpo", "bilevel"] = Field(
        "outcome",
        description="what a token is judged by. outcome: the episode's score; turns: what its turn and the "
        "later ones earned; process: normalised rewards of turns, summed to the end; gigpo: turns that saw "
        "the same against each other; bilevel: with a critic, over turns and then over tokens",
    )
    baseline: float | None = Field(
        None, allow_inf_nan=False, description="a fixed number that reinforce subtracts"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount a token, of critics and batch returns")
    turn_gamma: float | None = Field(
        None, ge=0, le=1, description="discount a turn; unset: 0.95 with gigpo, else 1"
    )
    anchor_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="ω of gigpo: the weight of the step's part"
    )
    normalise: Literal["none", "domain", "task", "environment"] = Field(
        "none",
        description="keeps one kind of task from dominating. domain: scores to deviation 1 within each "
        "domain; task: token advantages to mean 0 and deviation 1 within each domain (AgentRL); "
        "environment: group mean, deviation of the environment (ERPO)",
    )
    bonuses: tuple[BonusSection, ...] = Field(
        (), description="tables of their own, [[rl.bonuses]]: rewards for form"
    )
    overlong_penalty: float | None = Field(
        None, ge=0, description="weight of the soft punishment of turns near max_tokens; dapo: 1"
    )
    overlong_share: float = Field(
        0.2, gt=0, le=1, description="share of max_tokens over which that punishment grows to its full weight"
    )
    critic: CriticSection | None = Field(
        None, description="a section of its own, [rl.critic]; ppo has one in any case"
    )
    # -- which tasks
    epochs: int | None = Field(
        None,
        ge=1,
        description="passes over the tasks after which RL ends, with a smaller last batch where they do not "
        "fill it; unset: as many as `steps` take. With uniform sampling only",
    )
    sampling: Literal["uniform", "adaptive", "prioritised", "curriculum"] = Field(
        "uniform",
        description="adaptive: domains by p(1-p) of their moving success, with a floor; prioritised: tasks "
        "by 1 - p; curriculum: levels (`level` in a task's data) open one by one as the last is half solved",
    )
    dynamic_sampling: bool | None = Field(
        None, description="drop groups whose members all earn the same and play others instead; dapo: true"
    )
    max_refills: int = Field(
        8, ge=0, description="rounds of such other groups in one step; none left that differs: the run stops"
    )
    keep_groups: float = Field(
        1.0, gt=0, le=1, description="share of the groups, those of the widest rewards, that is trained on"
    )
    horizon_start: int | None = Field(
        None, ge=1, description="turns an episode at first, growing to rollout.max_turns"
    )
    horizon_every: int = Field(10, ge=1, description="steps for each turn that the horizon grows")
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0: only the end")
    stop_at_success: float | None = Field(
        None, gt=0, le=1, description="end when the mean training success of the last 5 steps reaches it"
    )
    max_minutes: float | None = Field(
        None, gt=0, description="no new step begins after this time in steps (evaluations not counted)"
    )

    on_alarm: Literal["warn", "stop", "remedy"] = Field(
        "warn",
        description="when the run looks like collapsing: warn only; stop with a checkpoint; or apply the "
        "alarm's advice, once for each alarm",
    )

    @model_validator(mode="after")
    def _known(self) -> RlSection:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"there is no algorithm {self.algorithm!r}.{nearest(self.algorithm, ALGORITHMS)} "
                f"Known: {', '.join(ALGORITHMS)}"
            )
        check_row(self, self.row())
        return self

    def row(self) -> Algorithm:
        """The algorithm's row with this recipe's overrides."""
        row = with_kl(ALGORITHMS[self.algorithm], self.kl_coefficient, self.kl_in, self.kl_estimator)
        own = (
            "sequence",
            "aggregation",
            "scale",
            "whiten",
            "clip_low",
            "clip_high",
            "clip_absolute",
            "dual_clip",
            "dynamic_sampling",
            "overlong_penalty",
        )
        changes: dict[str, Any] = {k: getattr(self, k) for k in own if getattr(self, k) is not None}
        return dataclasses.replace(row, **changes)
