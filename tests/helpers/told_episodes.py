"""Finished episodes made by hand: turns of so many tokens, with rewards, for tests of credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepladder.types import (
    Group,
    Message,
    Sampling,
    Score,
    StopReason,
    Task,
    ToolCall,
    TrainingSample,
    Trajectory,
    Turn,
)


def episode(
    rewards: Sequence[float | None],
    *,
    tokens: Sequence[int] | None = None,
    score: float | None = None,
    saw: Sequence[str] | None = None,
    calls: Sequence[int] | None = None,
    split_after: int | None = None,
    domain: str = "default",
    stop: StopReason = "terminated",
    name: str = "t",
    gap: int = 2,
    parts: dict[str, float | None] | None = None,
    answers: Sequence[str] | None = None,
    behaviour: float = -1.0,
) -> Trajectory:
    """One turn for each reward, of `tokens[k]` trained tokens (1 by default), `gap` observation tokens before
    each. `saw[k]` is what turn k answers to; `split_after` k: turns after k are in a second sample."""
    n = len(rewards)
    lengths = list(tokens or [1] * n)
    seen = list(saw or [f"o{k}" for k in range(n)])
    said = list(answers or ["a"] * n)
    turns, messages = [], []
    for k in range(n):
        made = tuple(ToolCall("f") for _ in range(calls[k] if calls else 0))
        messages += [Message("user", seen[k]), Message("assistant", said[k], tool_calls=made, raw=said[k])]
        ids = (7,) * lengths[k]
        turns.append(Turn((5,), ids, (behaviour,) * lengths[k], Sampling(), ((0, lengths[k]),), "stop"))
    cut = n if split_after is None else split_after + 1
    pieces = [range(0, cut), range(cut, n)]
    samples = tuple(_sample(lengths, piece, gap, name, behaviour) for piece in pieces if len(piece))
    total = sum(r for r in rewards if r is not None) if score is None else score
    unscored = score is None and any(r is None for r in rewards)
    return Trajectory(
        name,
        "g",
        Task("task", domain=domain),
        tuple(turns),
        tuple(messages),
        tuple(rewards),
        Score(None if unscored else total, parts or {}),
        stop,
        samples=samples,
    )


def group(*trajectories: Trajectory, name: str = "g") -> Group:
    return Group(name, trajectories[0].task, trajectories)


def _sample(lengths: Sequence[int], turns: range, gap: int, name: str, behaviour: float) -> TrainingSample:
    ids: list[int] = []
    mask: list[bool] = []
    owner: list[int] = []
    for k in turns:
        ids += [5] * gap + [7] * lengths[k]
        mask += [False] * gap + [True] * lengths[k]
        owner += [-1] * gap + [k] * lengths[k]
    logprobs = tuple(behaviour if m else 0.0 for m in mask)
    return TrainingSample(tuple(ids), tuple(mask), logprobs, name, tuple(owner), "g")


def by_token(batch: Any) -> list[list[float]]:
    """For each row the advantages of its trained tokens."""
    out = []
    for i, sample in enumerate(batch.samples):
        row = batch.advantages[i]
        at = [t for t, m in enumerate(sample.mask) if m]
        out.append([float(row) if row.dim() == 0 else float(row[t]) for t in at])
    return out
