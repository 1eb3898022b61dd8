"""Tables of [rl] about the loss: its clip, its KL term, its entropy, old tokens, and replay."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from stepladder.algorithms import Algorithm
from stepladder.recipe.section import Refusals, Section


class ClipSection(Section):
    """How the ratio is clipped, where it should not be as the algorithm's row says."""

    low: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    high: float | None = Field(None, ge=0, description="instead of the algorithm's own")
    absolute: bool | None = Field(None, description="of cispo: `high` is the cap itself")
    dual: float | None = Field(None, gt=1, description="bound on ratio times a negative advantage")


class KlSection(Section):
    """The KL term that holds the policy near a reference."""

    coefficient: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="weight of the term, instead of the algorithm's own; 0 saves the reference model",
    )
    place: Literal["loss", "reward"] | None = Field(
        None, description="where the term stands, instead of the algorithm's own: one place, never both"
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="k1 in the reward; in the loss k2 (the true reverse KL) or k3 (GRPO's)"
    )
    target: float | None = Field(
        None, gt=0, description="nats per episode; the coefficient in the reward moves towards it"
    )
    horizon: int = Field(10_000, ge=1, description="episodes over which that coefficient adapts")
    reference_every: int = Field(
        0, ge=0, description="steps after which the reference becomes the policy of then; 0: never"
    )

    def applied_to(self, row: Algorithm) -> Algorithm:
        """Return the row with its KL term moved, weighed or taken away; in one place or in none.

        In the reward it is k1; moved from there into the loss k2: both mean the reverse KL. A row that has no
        KL term of its own gets GRPO's, k3 in the loss. Raises ValueError.
        """
        weight = row.kl_coefficient if self.coefficient is None else self.coefficient
        if weight == 0:
            if self.place is not None or self.estimator is not None:
                raise ValueError(
                    f"kl.place={self.place!r} and kl.estimator={self.estimator!r} say where a KL term stands "
                    f"and how it is estimated, but {row.name!r} has none here (kl.coefficient is 0); set "
                    "rl.kl.coefficient = 0.01"
                )
            return dataclasses.replace(row, kl_in="none", kl_coefficient=0.0)
        where = self.place or ("loss" if row.kl_in == "none" else row.kl_in)
        estimator = self.estimator
        if estimator is None:
            own = {"none": "k3", where: row.kl_estimator}.get(row.kl_in, "k2")
            estimator = "k1" if where == "reward" else own
        if (where == "reward") != (estimator == "k1"):
            wrong = (
                "k1 in the loss has no gradient on average; take k2 or k3"
                if where == "loss"
                else f"{estimator} in the reward is a biased penalty; take k1"
            )
            raise ValueError(f"kl.estimator={estimator!r} with the KL term in the {where}: {wrong}")
        return dataclasses.replace(row, kl_in=where, kl_estimator=estimator, kl_coefficient=weight)


class EntropySection(Section):
    """The entropy bonus of the loss: of fixed weight, or moved to keep the entropy up."""

    coefficient: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of the bonus")
    target: float | None = Field(
        None, gt=0, description="nats per token; the bonus grows below it and is off above it"
    )
    step: float = Field(0.005, gt=0, description="by how much that bonus moves at each step")

    refusals: ClassVar[Refusals] = {
        "coefficient={s.coefficient:g} is fixed, target={s.target:g} moves it from 0; give one of "
        "them": lambda s: s.target is not None and s.coefficient,
    }


class OffPolicySection(Section):
    """Tokens that another policy sampled: an older one, or the same one in another precision."""

    max_staleness: int = Field(
        0,
        ge=0,
        description="updates that a token may be old when it is trained on. 0: synchronous; from 1 on, "
        "episodes are played while the policy is trained",
    )
    correction: Literal["auto", "none", "token_cap", "token_mask", "behaviour"] = Field(
        "auto",
        description="for tokens that another policy sampled (bf16, or max_staleness). token_cap: each "
        "weighed by proximal / behaviour, at most 2 (truncated importance sampling; with a clip, the "
        "decoupled objective); token_mask: those outside 0.5 to 2 dropped (IcePop); behaviour: clipped "
        "against the sampler itself (PPO as in the paper); auto: token_cap where it is needed",
    )


class ReplaySection(Section):
    """The demonstrations of [sft] in every update, which hold what RL would unlearn."""

    weight: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="of the SFT loss of the demonstrations; 0: no replay"
    )
    batch: int = Field(8, ge=1, description="demonstrations in an update")
