"""Settings of [rl] that contradict the algorithm's row or each other; each sentence names what works."""

from __future__ import annotations

from typing import Any

from stepladder.algorithms import Algorithm
from stepladder.recipe.section import Refusals


def _compares(s: Any, row: Algorithm) -> bool:
    """Whether advantages need several episodes of a task."""
    needs = row.advantage == "group" or row.baseline != "none" or s.credit.kind in ("process", "gigpo")
    return needs and s.credit.advantage is None


def _by_tokens(s: Any, row: Algorithm) -> bool:
    """Whether returns are discounted token by token."""
    return row.advantage in ("gae", "batch_whiten") and s.credit.advantage is None


def _by_turns(s: Any, row: Algorithm) -> bool:
    return s.credit.kind in ("gigpo", "bilevel") or (s.credit.kind == "turns" and not _by_tokens(s, row))


_GIVEN_BY = {  # kinds of credit, and the advantages that they go with
    "outcome": ("constant", "group", "batch_whiten", "gae"),
    "turns": ("constant", "group", "batch_whiten", "gae"),
    "process": ("group",),
    "gigpo": ("group",),
    "bilevel": ("gae",),
}


def _foreign_credit(s: Any, row: Algorithm) -> bool:
    return s.credit.advantage is None and row.advantage not in _GIVEN_BY[s.credit.kind]


def _by_domain(s: Any) -> bool:
    return s.credit.normalise in ("domain", "environment") and s.credit.advantage is None


_TASKS: Refusals = {
    "rl.off_policy.max_staleness={s.off_policy.max_staleness} plays ahead of the update, so "
    "dynamic_sampling cannot refill its batch; set rl.tasks.dynamic_sampling = false, or "
    "rl.off_policy.max_staleness = 0": lambda s, row: s.off_policy.max_staleness and row.dynamic_sampling,
    "group_size={s.group_size}: {row.name!r} compares the episodes of a group, so it needs at least 2; "
    "for example group_size = 8": lambda s, row: s.group_size < 2 and _compares(s, row),
    "group_size={s.group_size}: a group of one cannot differ in its rewards; for example group_size = 8, "
    "or leave tasks.dynamic_sampling and tasks.keep_groups out": lambda s, row: (
        s.group_size < 2 and (row.dynamic_sampling or s.tasks.keep_groups < 1)
    ),
}

_LOSS: Refusals = {
    "{row.name!r} has no ratio to clip, so rl.clip means nothing (it has {s.clip}); leave it out, or use "
    "algorithm = 'grpo'": lambda s, row: (
        row.surrogate == "reinforce" and s.loss is None and s.clip.model_dump(exclude_none=True)
    ),
    "clip.absolute belongs to cispo; {row.name!r} clips around 1, so leave it out": lambda s, row: (
        s.clip.absolute and row.surrogate != "cispo"
    ),
    "with clip.absolute = true, clip.high is the largest weight of a token, and {row.clip_high:g} would "
    "shrink the gradient of tokens that have not moved at all; for example clip.high = 5.0, or leave "
    "clip.absolute out": lambda s, row: s.clip.absolute and row.clip_high <= 1.0,
    "clip.dual={s.clip.dual:g}: cispo has none; leave it out": lambda s, row: (
        s.clip.dual is not None and row.surrogate == "cispo"
    ),
    "sequence='turn' changes nothing for {row.name!r}: its ratios are those of tokens, and aggregation="
    "{row.aggregation!r} counts tokens; use algorithm = 'gspo', or aggregation = "
    "'sequence_mean'": lambda s, row: (
        row.sequence == "turn"
        and row.ratio_level == "token"
        and row.aggregation in ("token_mean", "group_token_mean")
    ),
    "off_policy.correction='behaviour' clips the ratio to the sampler, and {row.name!r} has no ratio; "
    "use correction = 'token_cap'": lambda s, row: (
        s.off_policy.correction == "behaviour" and row.surrogate == "reinforce" and s.loss is None
    ),
    "kl.target={s.kl.target:g} moves the coefficient of a KL term in the reward, and {row.name!r} has "
    "none; add kl.place = 'reward'": lambda s, row: s.kl.target is not None and row.kl_in == "none",
    "kl.target={s.kl.target:g} moves the coefficient of a KL term in the reward, and {row.name!r} has "
    "its in the loss; add kl.place = 'reward'": lambda s, row: (
        s.kl.target is not None and row.kl_in == "loss"
    ),
    "kl.reference_every={s.kl.reference_every} refreshes the reference of a KL term, and {row.name!r} "
    "has none here; set kl.coefficient = 0.01": lambda s, row: s.kl.reference_every and row.kl_in == "none",
}

_CREDIT: Refusals = {
    "{row.name!r} has no critic; remove [rl.critic], or use algorithm = 'ppo'": lambda s, row: (
        s.critic is not None and not row.needs_critic
    ),
    "{row.name!r} does not divide by a deviation of rewards, so credit.scale={s.credit.scale!r} means "
    "nothing; leave it out, or use algorithm = 'grpo'": lambda s, row: (
        s.credit.scale is not None and row.advantage != "group"
    ),
    "credit.baseline={s.credit.baseline:g} is the fixed number of 'reinforce'; {row.name!r} has its "
    "own": lambda s, row: s.credit.baseline is not None and row.advantage != "constant",
    "credit.gamma={s.credit.gamma:g} is a discount per token, and {row.name!r} gives all tokens of an "
    "episode or turn the same; leave it out, use algorithm = 'ppo', or credit.kind = 'turns' with "
    "turn_gamma": lambda s, row: s.credit.gamma != 1 and not _by_tokens(s, row),
    "credit.turn_gamma={s.credit.turn_gamma:g} is a discount per turn, which credit.kind="
    "{s.credit.kind!r} with {row.name!r} does not take; leave it out, or use gamma": lambda s, row: (
        s.credit.turn_gamma is not None and _by_tokens(s, row) and not _by_turns(s, row)
    ),
    "credit.turn_gamma={s.credit.turn_gamma:g} is a discount per turn, which credit.kind="
    "{s.credit.kind!r} with {row.name!r} does not take; leave it out, or set credit.kind = "
    "'turns'": lambda s, row: s.credit.turn_gamma is not None and not _by_turns(s, row),
    "rl.credit.advantage = {s.credit.advantage!r} replaces what kind={s.credit.kind!r}, normalise="
    "{s.credit.normalise!r} and a critic would compute; leave those out": lambda s, row: (
        s.credit.advantage is not None
        and (
            s.credit.kind != "outcome" or s.credit.normalise in ("domain", "environment") or row.needs_critic
        )
    ),
    "credit.kind='bilevel' does not go with {row.name!r}; use algorithm = 'ppo', or kind = "
    "'turns'": lambda s, row: _foreign_credit(s, row) and s.credit.kind == "bilevel",
    "credit.kind={s.credit.kind!r} does not go with {row.name!r}; use algorithm = 'grpo', or kind = "
    "'turns'": lambda s, row: _foreign_credit(s, row),
    "credit.normalise={s.credit.normalise!r} takes the scores of whole episodes; with {row.name!r} and "
    "kind={s.credit.kind!r} use normalise = 'task'": lambda s, row: (
        _by_domain(s) and (s.credit.kind != "outcome" or row.advantage not in ("group", "constant"))
    ),
    "group_size={s.group_size}: credit.normalise='environment' takes the mean of a task's episodes off "
    "each, so it needs at least 2; try group_size = 8, or leave normalise out": lambda s, row: (
        _by_domain(s) and s.credit.normalise == "environment" and s.group_size < 2
    ),
    "credit.normalise={s.credit.normalise!r} divides by its own deviation, so scale={s.credit.scale!r} "
    "means nothing; leave it out": lambda s, row: _by_domain(s) and s.credit.scale is not None,
}

REFUSALS: Refusals = {**_LOSS, **_CREDIT, **_TASKS}
