"""Keys of recipes that stand in another place than they did, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOVED = {
    "rl.clip_low": "rl.clip.low",
    "rl.clip_high": "rl.clip.high",
    "rl.clip_absolute": "rl.clip.absolute",
    "rl.dual_clip": "rl.clip.dual",
    "rl.kl_coefficient": "rl.kl.coefficient",
    "rl.kl_in": "rl.kl.place",
    "rl.kl_estimator": "rl.kl.estimator",
    "rl.kl_target": "rl.kl.target",
    "rl.kl_horizon": "rl.kl.horizon",
    "rl.reference_every": "rl.kl.reference_every",
    "rl.entropy_coefficient": "rl.entropy.coefficient",
    "rl.entropy_target": "rl.entropy.target",
    "rl.entropy_step": "rl.entropy.step",
    "rl.max_staleness": "rl.off_policy.max_staleness",
    "rl.correction": "rl.off_policy.correction",
    "rl.replay": "rl.replay.weight",
    "rl.replay_batch": "rl.replay.batch",
    "rl.credit": "rl.credit.kind",
    "rl.advantage": "rl.credit.advantage",
    "rl.baseline": "rl.credit.baseline",
    "rl.scale": "rl.credit.scale",
    "rl.normalise": "rl.credit.normalise",
    "rl.whiten": "rl.credit.whiten",
    "rl.gamma": "rl.credit.gamma",
    "rl.turn_gamma": "rl.credit.turn_gamma",
    "rl.anchor_weight": "rl.credit.anchor_weight",
    "rl.overlong_penalty": "rl.overlong.penalty",
    "rl.overlong_share": "rl.overlong.share",
    "rl.sampling": "rl.tasks.sampling",
    "rl.epochs": "rl.tasks.epochs",
    "rl.dynamic_sampling": "rl.tasks.dynamic_sampling",
    "rl.max_refills": "rl.tasks.max_refills",
    "rl.keep_groups": "rl.tasks.keep_groups",
    "rl.horizon_start": "rl.horizon.start",
    "rl.horizon_every": "rl.horizon.every",
    "preference.gamma": "preference.simpo.gamma",
    "preference.gamma_beta_ratio": "preference.simpo.gamma_beta_ratio",
    "preference.desirable_weight": "preference.kto.desirable_weight",
    "preference.undesirable_weight": "preference.kto.undesirable_weight",
    "preference.max_prompt_tokens": "preference.limits.max_prompt_tokens",
    "preference.max_completion_tokens": "preference.limits.max_completion_tokens",
    "preference.keep": "preference.limits.keep",
    "preference.overlong": "preference.limits.overlong",
    "process_reward_model.tasks": "process_reward_model.monte_carlo.tasks",
    "process_reward_model.solutions_per_task": "process_reward_model.monte_carlo.solutions_per_task",
    "process_reward_model.completions": "process_reward_model.monte_carlo.completions",
    "process_reward_model.labels": "process_reward_model.monte_carlo.labels",
}
"""Old place to new place."""


def moved(key: str, value: Any) -> str | None:
    """Return the sentence that names the new place of an old key, or None for any other key.

    Some old keys, such as rl.credit, are names of tables now: with a table as value, or with None, which
    removes it, they are no old keys.

    >>> moved("rl.kl_coefficient", 0.1)
    'rl.kl_coefficient is now rl.kl.coefficient'
    """
    is_table = isinstance(value, Mapping) or (value is None and MOVED.get(key, "").startswith(f"{key}."))
    if key not in MOVED or is_table:
        return None
    return f"{key} is now {MOVED[key]}"


def moved_keys(sections: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the sentence of every old key in nested `sections`."""
    for key, value in sections.items():
        sentence = moved(f"{prefix}{key}", value)
        if sentence is not None:
            yield sentence
        elif isinstance(value, Mapping):
            yield from moved_keys(value, f"{prefix}{key}.")
