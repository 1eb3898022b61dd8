"""Applying an alarm's advice to the settings of a run that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from stepladder.diagnostics.alarm import Change
from stepladder.sections.rl import RlSection


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
        data = {**settings.model_dump(), change.key: after}
        try:
            settings = RlSection.model_validate(data)
        except ValidationError:  # the algorithm's row refuses the key
            continue
        taken[change.key] = [before, after]
    return settings, taken


def present(settings: RlSection, key: str) -> Any:
    """The value in force: the recipe's, else the algorithm's own."""
    value = getattr(settings, key)
    return value if value is not None else getattr(settings.row(), key, None)
