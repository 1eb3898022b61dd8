"""Health of the episodes of a step: failures by boundary, masks, staleness, tool errors and recoveries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import get_args, get_type_hints

from stepladder.types import Failure, Group, Message, Trajectory

BOUNDARIES: tuple[str, ...] = get_args(get_type_hints(Failure)["boundary"])


def health_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Numbers of one step's episodes. version: of the weights that are about to be updated with them."""
    played = [t for g in groups for t in g.trajectories]
    whole = [t for t in played if t.failure is None]
    return {
        **failure_counts(played),
        **staleness(whole, version),
        **recovery(whole),
        "masked_tokens": masked_share(whole),
        "solved_groups": _share_of_groups(groups, True),
        "unsolved_groups": _share_of_groups(groups, False),
    }


def failure_counts(played: Sequence[Trajectory]) -> dict[str, float]:
    """Episodes that broke, by the boundary they broke at. Unsolved tasks are none of these."""
    found: Counter[str] = Counter(t.failure.boundary for t in played if t.failure is not None)
    return {f"failed/{boundary}": float(found[boundary]) for boundary in BOUNDARIES}


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many updates old the sampled tokens are: mean, largest, and the share of tokens at each lag."""
    lags: Counter[int] = Counter()
    for t in trajectories:
        for turn in t.turns:
            for sampled_by, count in turn.versions:
                lags[version - sampled_by] += count
    total = max(lags.total(), 1)
    return {
        "version_lag": sum(lag * n for lag, n in lags.items()) / total,
        "version_lag_max": float(max(lags, default=0)),
        **{f"version_lag/{lag}": lags[lag] / total for lag in sorted(lags)},
    }


def masked_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of the tokens of all samples that are not trained (prompts, tool output, glue)."""
    masks = [sample.mask for t in trajectories for sample in t.samples]
    total = sum(map(len, masks))
    return 1 - sum(map(sum, masks)) / total if total else math.nan


def recovery(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Self-correction: `tool_errors`, the share of episodes with a failed call, and of those `recovered`.

    Recovered: a later call of the episode worked, or the episode was solved all the same.
    """
    erred = [t for t in trajectories if any(map(failed_call, t.messages))]
    back = [t for t in erred if t.solved or _worked_after(t.messages)]
    return {
        "tool_errors": len(erred) / max(len(trajectories), 1),
        "recovered": len(back) / len(erred) if erred else math.nan,
    }


def failed_call(message: Message) -> bool:
    """The answer to a tool call that could not be read, was refused, or raised."""
    return message.role == "tool" and message.text.startswith("Error:")


def _worked_after(messages: Sequence[Message]) -> bool:
    answers = [failed_call(m) for m in messages if m.role == "tool"]
    return not all(answers[answers.index(True) :])


def _share_of_groups(groups: Sequence[Group], wanted: bool) -> float:
    """Groups whose members that did not fail all succeeded, or all did not."""
    count = 0
    for group in groups:
        whole = [t.solved for t in group.trajectories if t.failure is None]
        count += bool(whole) and all(s is wanted for s in whole)
    return count / max(len(groups), 1)
