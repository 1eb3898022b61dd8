"""Small trajectories for the tests of the diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepladder.types import (
    Failure,
    Group,
    Message,
    Sampling,
    Score,
    Task,
    TrainingSample,
    Trajectory,
    Turn,
)


def episode(
    score: float | None,
    *,
    ids: Sequence[int] = (1,),
    prompt: Sequence[int] = (0,),
    logprob: float = -0.2,
    failed: Any = None,
    versions: tuple[tuple[int, int], ...] | None = None,
    messages: tuple[Message, ...] = (),
) -> Trajectory:
    """One turn of `ids` after `prompt`, each token at `logprob`."""
    n = len(ids)
    turn = Turn(tuple(prompt), tuple(ids), (logprob,) * n, Sampling(), versions or ((0, n),), "stop")
    flat = (*prompt, *ids)
    mask = tuple(i >= len(prompt) for i in range(len(flat)))
    turn_ids = tuple(0 if m else -1 for m in mask)
    sample = TrainingSample(flat, mask, tuple(logprob if m else 0.0 for m in mask), "t", turn_ids, "g")
    return Trajectory(
        id="t",
        group_id="g",
        task=Task("train/0"),
        turns=(turn,),
        messages=messages,
        rewards=(score,),
        score=Score(score),
        stop_reason="failed" if failed else "terminated",
        failure=Failure(failed, "Broken", "for the test") if failed else None,
        samples=(sample,),
    )


def group(name: str, members: Sequence[Trajectory]) -> Group:
    return Group(name, Task("train/0"), tuple(members))
