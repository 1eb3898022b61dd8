"""Applying an alarm's advice to the settings of a run that is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from stepladder.diagnostics.alarm import Change
from stepladder.recipe.rl import COLUMNS, RlSection

_OWN = {key: column for column, key in COLUMNS.items()} | {"kl.coefficient": "kl_coefficient"}


def remedied(settings: RlSection, changes: Sequence[Change]) -> tuple[RlSection, dict[str, Any]]:
    """Return the settings after `changes`, and those that took effect as {dotted key: [before, after]}.

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
        if change.key.startswith("clip.") and settings.row().ratio_level == "sequence":
            continue  # gspo's ratio is a mean over tokens: .28 is no clip where its own is 4e-4
        follows = {k: v for k, v in _follow(change.key, after).items() if attrgetter(k)(settings) != v}
        try:
            new = with_keys(settings, {change.key: after, **follows})
        except ValidationError:  # the algorithm's row refuses the key
            continue
        taken |= {k: [attrgetter(k)(settings), v] for k, v in follows.items()}
        taken[change.key] = [before, after]
        settings = new
    return settings, taken


def _follow(key: str, value: Any) -> dict[str, Any]:
    """Return keys that contradict `key` = `value`, and what they are then: a recipe may have given them."""
    if key == "kl.coefficient" and value == 0:
        return {"kl.place": None, "kl.estimator": None, "kl.target": None, "kl.reference_every": 0}
    return {"entropy.coefficient": 0.0} if key == "entropy.target" else {}


def present(settings: RlSection, key: str) -> Any:
    """Return the value in force: the recipe's, else the algorithm's own."""
    value = attrgetter(key)(settings)
    return getattr(settings.row(), _OWN[key]) if value is None and key in _OWN else value


def with_keys(settings: RlSection, changes: Mapping[str, Any]) -> RlSection:
    """Return the settings with other values at some dotted keys. Raises ValidationError."""
    data = settings.model_dump()
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = data
        for name in tables:
            table = table[name]
        table[last] = value
    return RlSection.model_validate(data)
