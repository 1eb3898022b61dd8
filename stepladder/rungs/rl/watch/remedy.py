"""Applying an alarm's advice to the settings of a run that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from stepladder.diagnostics.alarm import Change
from stepladder.recipe.rl import RlSection


def remedied(settings: RlSection, changes: Sequence[Change]) -> tuple[RlSection, dict[str, Any]]:
    """The settings after `changes`, and those that took effect as {key: [before, after]}.

    A change that the recipe's algorithm has no use for (a clip without a ratio, a KL term that is not there)
    is left out, as is one that would change nothing.
    """
    taken: dict[str, Any] = {}
    for change in changes:
        before = present(settings, change.key)
        if change.how == "times" and before is None:
            continue
        after = change.applied(before)
        if after == before:
            continue
        if change.key.startswith("clip") and settings.row().ratio_level == "sequence":
            continue  # gspo's ratio is a mean over tokens: .28 is no clip where its own is 4e-4
        follows = {k: v for k, v in _follow(change.key, after).items() if getattr(settings, k) != v}
        try:
            new = RlSection.model_validate({**settings.model_dump(), change.key: after, **follows})
        except ValidationError:  # the algorithm's row refuses the key
            continue
        taken |= {k: [getattr(settings, k), v] for k, v in follows.items()} | {change.key: [before, after]}
        settings = new
    return settings, taken


def _follow(key: str, value: Any) -> dict[str, Any]:
    """Keys that contradict `key` = `value`, and what they are then: a recipe may have given them."""
    if key == "kl_coefficient" and value == 0:
        return {"kl_in": None, "kl_estimator": None, "kl_target": None, "reference_every": 0}
    return {"entropy_coefficient": 0.0} if key == "entropy_target" else {}


def present(settings: RlSection, key: str) -> Any:
    """The value in force: the recipe's, else the algorithm's own."""
    value = getattr(settings, key)
    return value if value is not None else getattr(settings.row(), key, None)
