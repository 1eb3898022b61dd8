"""Counting what rejection sampling accepted, and what it threw away for which reason."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.rejection_sampling.selection import REASONS, Reason
from stepladder.types import Group


def count(
    tally: MutableMapping[str, int],
    groups: Sequence[Group],
    selected: Sequence[Sequence[Reason]],
    *,
    pairs: int,
) -> None:
    """Add finished groups to a tally: episodes by reason, tasks, tasks solved at least once, pairs."""
    for group, reasons in zip(groups, selected, strict=True):
        for reason in reasons:
            tally[reason] = tally.get(reason, 0) + 1
        tally["sampled"] = tally.get("sampled", 0) + len(reasons)
        tally["tasks"] = tally.get("tasks", 0) + 1
        tally["passed"] = tally.get("passed", 0) + any(t.solved for t in group.trajectories)
    tally["pairs"] = tally.get("pairs", 0) + pairs


def shares(tally: Mapping[str, int]) -> Metrics:
    """The metrics of a tally; pass@n is the share of tasks that one of their n episodes solved."""
    return {
        "accepted": float(tally.get("accepted", 0)),
        "acceptance": tally.get("accepted", 0) / max(tally.get("sampled", 0), 1),
        "pass_at_n": tally.get("passed", 0) / max(tally.get("tasks", 0), 1),
        "pairs": float(tally.get("pairs", 0)),
        **{f"rejected/{reason}": float(tally.get(reason, 0)) for reason in REASONS},
    }


def told(tally: Mapping[str, int], n: int) -> str:
    """A tally as a sentence."""
    found = shares(tally)
    away = [f"{tally[reason]} {WORDS[reason]}" for reason in REASONS if tally.get(reason)]
    return (
        f"{tally.get('accepted', 0)} of {tally.get('sampled', 0)} episodes accepted "
        f"({found['acceptance']:.0%}), pass@{n} {found['pass_at_n']:.0%}, {tally.get('pairs', 0)} pairs; "
        f"thrown away: {', '.join(away) or 'nothing'}"
    )


WORDS = {
    "failed": "failed",
    "cut": "cut off",
    "unscored": "unscored",
    "unsolved": "unsolved",
    "not_drawn": "not drawn",
    "duplicate": "said before",
    "over_cap": "over the cap",
}
