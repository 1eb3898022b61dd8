"""Failures by boundary, staleness, masks and recoveries, by hand."""

from __future__ import annotations

import math

import pytest
from episodes import episode, group

from stepladder.diagnostics.health import (
    failure_counts,
    health_metrics,
    masked_share,
    recovery,
    staleness,
)
from stepladder.types import Message


def test_failures_are_counted_by_boundary_and_unsolved_tasks_are_none() -> None:
    played = [episode(0.0), episode(None, failed="tool"), episode(None, failed="tool"), episode(1.0)]
    assert failure_counts(played) == {
        "failed/engine": 0.0,
        "failed/tool": 2.0,
        "failed/environment": 0.0,
        "failed/reward": 0.0,
    }


def test_the_lag_is_counted_in_tokens() -> None:
    """Weights are at version 5. Ten tokens: six of version 5 (lag 0), three of 4, one of 2 (lag 3).
    Mean (3·1 + 1·3)/10."""
    old = episode(0.0, ids=range(1, 5), versions=((2, 1), (4, 3)))
    new = episode(0.0, ids=range(1, 7), versions=((5, 6),))
    assert staleness([old, new], 5) == pytest.approx(
        {
            "version_lag": 0.6,
            "version_lag_max": 3.0,
            "version_lag/0": 0.6,
            "version_lag/1": 0.3,
            "version_lag/3": 0.1,
        }
    )


def test_the_masked_share_is_of_tokens() -> None:
    assert (
        masked_share([episode(0.0, prompt=(0, 0, 0), ids=(1,)), episode(0.0, prompt=(0,), ids=(1, 2, 3))])
        == 0.5
    )
    assert math.isnan(masked_share([]))


def tool(text: str) -> Message:
    return Message("tool", text)


def test_recovery_is_a_later_success_of_the_same_episode() -> None:
    back = episode(0.0, messages=(tool("Error: no such key"), tool("4")))
    lost = episode(0.0, messages=(tool("4"), tool("Error: division by zero")))
    anyway = episode(1.0, messages=(tool("Error: no such key"),))
    clean = episode(0.0, messages=(tool("Errors: 0"), tool("4")))
    assert recovery([back, lost, anyway, clean]) == {
        "tool_errors": 0.75,
        "recovered": pytest.approx(2 / 3),
    }
    assert math.isnan(recovery([clean])["recovered"])


def test_groups_by_outcome() -> None:
    groups = [
        group("a", [episode(1.0), episode(1.0)]),
        group("b", [episode(1.0), episode(0.0)]),
        group("c", [episode(0.0), episode(None, failed="engine")]),
        group("d", [episode(None, failed="engine")]),
    ]
    metrics = health_metrics(groups, 0)
    assert metrics["solved_groups"] == 0.25
    assert metrics["unsolved_groups"] == 0.25
