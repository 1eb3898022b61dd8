"""Settings of reinforcement learning that contradict each other: each refusal names what would work."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from stepladder.algorithms import Algorithm


def with_kl(
    row: Algorithm,
    coefficient: float | None,
    place: Literal["loss", "reward"] | None,
    estimator: Literal["k1", "k2", "k3"] | None,
) -> Algorithm:
    """The row with its KL term moved, weighed or taken away; in one place or in none.

    In the reward it is k1; moved from there into the loss k2: both mean the reverse KL. A row that has no KL
    term of its own gets GRPO's, k3 in the loss. Raises ValueError.
    """
    weight = row.kl_coefficient if coefficient is None else coefficient
    if weight == 0:
        if place is not None or estimator is not None:
            raise ValueError(
                f"kl_in={place!r} and kl_estimator={estimator!r} say where a KL term stands and how it is "
                f"estimated, but {row.name!r} has none here (kl_coefficient 0); set kl_coefficient = 0.01"
            )
        return dataclasses.replace(row, kl_in="none", kl_coefficient=0.0)
    where = place or ("loss" if row.kl_in == "none" else row.kl_in)
    if estimator is None:
        own = {"none": "k3", where: row.kl_estimator}.get(row.kl_in, "k2")
        estimator = "k1" if where == "reward" else own
    if (where == "reward") != (estimator == "k1"):
        wrong = (
            "k1 in the loss has no gradient on average; take k2 or k3"
            if where == "loss"
            else f"{estimator} in the reward is a biased penalty; take k1"
        )
        raise ValueError(f"kl_estimator={estimator!r} with the KL term in the {where}: {wrong}")
    return dataclasses.replace(row, kl_in=where, kl_estimator=estimator, kl_coefficient=weight)


def check_row(section: Any, row: Algorithm) -> None:
    """Raise ValueError where a setting would be ignored by this algorithm."""
    if section.max_staleness and row.dynamic_sampling:
        raise ValueError(
            f"max_staleness={section.max_staleness} plays ahead of the update, so dynamic_sampling cannot "
            "refill its batch; set dynamic_sampling = false, or max_staleness = 0"
        )
    if section.epochs is not None and section.sampling != "uniform":
        raise ValueError(
            f"epochs={section.epochs} promises every task equally often, and sampling={section.sampling!r} "
            "chooses among them; set sampling = 'uniform', or leave epochs out and end by steps"
        )
    _check_loss(section, row)
    _check_credit(section, row)
    if section.kl_target is not None and row.kl_in != "reward":
        raise ValueError(
            f"kl_target={section.kl_target:g} moves the coefficient of a KL term in the reward, and "
            f'{row.name!r} has {"none" if row.kl_in == "none" else "its in the loss"}; add kl_in = "reward"'
        )
    if section.reference_every and row.kl_in == "none":
        raise ValueError(
            f"reference_every={section.reference_every} refreshes the reference of a KL term, and "
            f"{row.name!r} has none here; set kl_coefficient = 0.01"
        )
    if section.critic is not None and not row.needs_critic:
        raise ValueError(f"{row.name!r} has no critic; remove [rl.critic], or use algorithm = 'ppo'")
    critic = section.critic
    if critic is not None and critic.trunk == "shared" and (critic.warmup_steps or critic.updates_per_batch):
        raise ValueError(
            f"warmup_steps={critic.warmup_steps} and updates_per_batch={critic.updates_per_batch} are of a "
            "critic with a trunk of its own; leave them out, or set trunk = 'separate'"
        )
    needs = row.advantage == "group" or row.baseline != "none" or section.credit in ("process", "gigpo")
    if section.group_size < 2 and needs and section.advantage is None:
        raise ValueError(
            f"group_size={section.group_size}: {row.name!r} compares the episodes of a group, so it needs at "
            "least 2; for example group_size = 8"
        )
    if section.group_size < 2 and (row.dynamic_sampling or section.keep_groups < 1):
        raise ValueError(
            f"group_size={section.group_size}: a group of one cannot differ in its rewards; for example "
            "group_size = 8, or leave dynamic_sampling and keep_groups out"
        )


def _check_loss(section: Any, row: Algorithm) -> None:
    if row.surrogate == "reinforce":
        given = {k: getattr(section, k) for k in ("clip_low", "clip_high", "dual_clip", "clip_absolute")}
        named = {k: v for k, v in given.items() if v is not None}
        if named and section.loss is None:
            raise ValueError(
                f"{row.name!r} has no ratio to clip, so {_listed(named)} mean nothing; leave them out, or "
                "use algorithm = 'grpo'"
            )
    if section.clip_absolute and row.surrogate != "cispo":
        raise ValueError(f"clip_absolute belongs to cispo; {row.name!r} clips around 1, so leave it out")
    if section.clip_absolute and (section.clip_high or 0.0) <= 1.0:
        cap = ".28, the default," if section.clip_high is None else f"{section.clip_high:g}"
        raise ValueError(
            f"with clip_absolute = true, clip_high is the largest weight of a token, and {cap} would shrink "
            "the gradient of tokens that have not moved at all; for example clip_high = 5.0, or leave "
            "clip_absolute out"
        )
    by_tokens = row.ratio_level == "token" and row.aggregation in ("token_mean", "group_token_mean")
    if row.sequence == "turn" and by_tokens:
        raise ValueError(
            f"sequence='turn' changes nothing for {row.name!r}: its ratios are those of tokens, and "
            f"aggregation={row.aggregation!r} counts tokens; use algorithm = 'gspo', or aggregation = "
            "'sequence_mean'"
        )
    if section.dual_clip is not None and row.surrogate == "cispo":
        raise ValueError(f"dual_clip={section.dual_clip:g}: cispo has none; leave it out")
    if section.correction == "behaviour" and row.surrogate == "reinforce" and section.loss is None:
        raise ValueError(
            f"correction='behaviour' clips the ratio to the sampler, and {row.name!r} has no ratio; use "
            "correction = 'token_cap'"
        )
    if section.entropy_target is not None and section.entropy_coefficient:
        raise ValueError(
            f"entropy_coefficient={section.entropy_coefficient:g} is fixed, entropy_target="
            f"{section.entropy_target:g} moves it from 0; give one of them"
        )


def _check_credit(section: Any, row: Algorithm) -> None:
    if row.advantage != "group" and section.scale is not None:
        raise ValueError(
            f"{row.name!r} does not divide by a deviation of rewards, so scale={section.scale!r} means "
            "nothing; leave it out, or use algorithm = 'grpo'"
        )
    if section.baseline is not None and row.advantage != "constant":
        raise ValueError(
            f"baseline={section.baseline:g} is the fixed number of 'reinforce'; {row.name!r} has its own"
        )
    _check_discounts(section, row)
    if section.advantage is not None:
        if section.credit != "outcome" or section.normalise in ("domain", "environment") or row.needs_critic:
            raise ValueError(
                f"rl.advantage = {section.advantage!r} replaces what credit={section.credit!r}, "
                f"normalise={section.normalise!r} and a critic would compute; leave those out"
            )
        return
    allowed: dict[str, tuple[str, ...]] = {
        "turns": ("group", "constant", "batch_whiten", "gae"),
        "process": ("group",),
        "gigpo": ("group",),
        "bilevel": ("gae",),
    }
    if row.advantage not in allowed.get(section.credit, (row.advantage,)):
        fitting = {"bilevel": "ppo"}.get(section.credit, "grpo")
        raise ValueError(
            f"credit={section.credit!r} does not go with {row.name!r}; use algorithm = {fitting!r}, or "
            "credit = 'turns'"
        )
    if section.normalise in ("domain", "environment"):
        if section.credit != "outcome" or row.advantage not in ("group", "constant"):
            raise ValueError(
                f"normalise={section.normalise!r} takes the scores of whole episodes; with "
                f"{row.name!r} and credit={section.credit!r} use normalise = 'task'"
            )
        if section.normalise == "environment" and section.group_size < 2:
            raise ValueError(
                f"group_size={section.group_size}: normalise='environment' takes the mean of a task's "
                "episodes off each, so it needs at least 2; try group_size = 8, or leave normalise out"
            )
        if section.scale is not None:
            raise ValueError(
                f"normalise={section.normalise!r} divides by its own deviation, so scale={section.scale!r} "
                "means nothing; leave it out"
            )


def _check_discounts(section: Any, row: Algorithm) -> None:
    by_tokens = row.advantage in ("gae", "batch_whiten") and section.advantage is None
    if section.gamma != 1 and not by_tokens:
        raise ValueError(
            f"gamma={section.gamma:g} is a discount a token, and {row.name!r} gives all tokens of an episode "
            "or turn the same; leave it out, use algorithm = 'ppo', or credit = 'turns' with turn_gamma"
        )
    by_turns = section.credit in ("gigpo", "bilevel") or (section.credit == "turns" and not by_tokens)
    if section.turn_gamma is not None and not by_turns:
        works = "use gamma" if by_tokens else "set credit = 'turns'"
        raise ValueError(
            f"turn_gamma={section.turn_gamma:g} is a discount a turn, which credit={section.credit!r} with "
            f"{row.name!r} does not take; leave it out, or {works}"
        )


def _listed(named: dict[str, Any]) -> str:
    return " and ".join(f"{key}={value}" for key, value in named.items())
