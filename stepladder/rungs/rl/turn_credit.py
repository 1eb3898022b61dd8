"""Credit turn by turn: what each turn earned from its own place on, against whom that is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stepladder.algorithms import Algorithm
from stepladder.errors import ConfigError
from stepladder.objectives.advantages import constant_advantages, group_advantages
from stepladder.objectives.credit import gigpo_advantages, process_advantages, spread_turns, turn_returns
from stepladder.rungs.episodes import value_of
from stepladder.rungs.rl.trained_tokens import TokenTable
from stepladder.types import Trajectory

OwnAdvantage = Callable[[Tensor, Tensor, Sequence[Trajectory]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRules:
    """How rewards become advantages, besides what the algorithm's row says. See `sections.rl` for each."""

    credit: Literal["outcome", "turns", "process", "gigpo", "bilevel"] = "outcome"
    normalise: Literal["none", "domain", "task", "environment"] = "none"
    baseline: float = 0.0
    gamma: float = 1.0
    turn_gamma: float = 1.0
    lam: float = 0.95
    turn_lam: float = 1.0
    anchor_weight: float = 1.0
    kl_coefficient: float = 0.0
    bootstrap: Literal["never", "limits", "always"] = "limits"
    own: OwnAdvantage | None = None


@dataclass(slots=True)
class Episodes:
    """The trajectories that take part, as columns [N]."""

    trajectories: list[Trajectory]
    scores: Tensor
    group: Tensor
    domain: Tensor
    environment: Tensor


def turn_advantages(
    kl: Tensor, episodes: Episodes, table: TokenTable, row: Algorithm, rules: CreditRules
) -> Tensor:
    """[N, K]: one advantage for each turn, spread over its tokens. `kl` [N, K] is charged to its turn."""
    counts = table.turns.max(dim=1).values + 1
    flat = _flat_turns(table, counts)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    rewards = torch.cat([turn_rewards(t, int(n)) for t, n in zip(episodes.trajectories, counts)])
    rewards = rewards.index_add(0, flat[table.mask], -kl[table.mask])
    group = episodes.group[owner]
    if rules.credit == "process":
        values = process_advantages(rewards, owner, group, ddof=row.ddof)
    elif rules.credit == "gigpo":
        scale: Literal["none", "group_std"] = "group_std" if row.scale == "group_std" else "none"
        values = gigpo_advantages(
            rewards,
            owner,
            group,
            _anchors(episodes.trajectories, counts),
            gamma=rules.turn_gamma,
            omega=rules.anchor_weight,
            scale=scale,
            ddof=row.ddof,
        )
    else:
        returns = turn_returns(rewards, owner, gamma=rules.turn_gamma)
        place = torch.cat([torch.arange(int(n)) for n in counts])
        values = _against_same_turn(returns, group, place, row, rules)
    return spread_turns(values, flat)


def own_advantages(function: OwnAdvantage, episodes: Episodes, table: TokenTable) -> Tensor:
    """What the user's function says: [N], or from one number for each turn [N, K].

    Raises ConfigError for another shape and for numbers that are none.
    """
    got = function(episodes.scores, episodes.group, episodes.trajectories)
    counts = table.turns.max(dim=1).values + 1
    if isinstance(got, Tensor) and got.shape == episodes.scores.shape:
        values = got.detach().double()
    else:
        lists = [] if isinstance(got, Tensor) else [list(v) if isinstance(v, Sequence) else None for v in got]
        if [-1 if v is None else len(v) for v in lists] != counts.tolist():
            raise ConfigError(
                f"rl.credit.advantage returned {type(got).__name__} for {len(counts)} trajectories; return a "
                f"tensor of shape ({len(counts)},), or for each trajectory a list with one number for each "
                f"turn (here {counts.tolist()[:4]}...)"
            )
        flat = torch.tensor([v for turns in lists for v in turns or ()], dtype=torch.float64)
        values = spread_turns(flat, _flat_turns(table, counts))
    if not torch.isfinite(values).all():
        raise ConfigError(
            "rl.credit.advantage returned NaN or infinity; return 0 for what should not be trained on"
        )
    return values


def turn_rewards(trajectory: Trajectory, turns: int, score: float | None = None) -> Tensor:
    """[turns]: each turn's own reward; what the score holds besides (a scorer's sum) falls to the last."""
    known = [0.0 if r is None else float(r) for r in trajectory.rewards[:turns]]
    rewards = torch.tensor(known + [0.0] * (turns - len(known)), dtype=torch.float64)
    rewards[-1] += (value_of(trajectory) if score is None else score) - float(rewards.sum())
    return rewards


def token_rewards(episodes: Episodes, table: TokenTable, rules: CreditRules, scores: Tensor) -> Tensor:
    """[N, K]: the score at the last token, or each turn's reward at that turn's last token."""
    rewards = torch.zeros(table.mask.shape, dtype=torch.float64)
    if rules.credit == "outcome":
        rewards[table.last()] = scores
        return rewards
    ends = table.turn_ends()
    for i, trajectory in enumerate(episodes.trajectories):
        rewards[i, ends[i]] = turn_rewards(trajectory, int(ends[i].sum()), float(scores[i]))
    return rewards


def numbered(names: Sequence[str]) -> Tensor:
    """Equal names get equal numbers.

    >>> numbered(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names], dtype=torch.long)


def _flat_turns(table: TokenTable, counts: Tensor) -> Tensor:
    """[N, K]: which of all turns, in order, sampled each token; -1 where there is none."""
    start = counts.cumsum(0) - counts
    return torch.where(table.mask, table.turns + start[:, None], -1)


def _against_same_turn(
    returns: Tensor, group: Tensor, place: Tensor, row: Algorithm, rules: CreditRules
) -> Tensor:
    """Returns-to-go less what the siblings got from the same turn on.

    A turn that no sibling reached is compared with the group's episodes from their start: without a
    baseline, the end of the longest episode would be all good or all bad.
    """
    if row.advantage == "constant":
        return constant_advantages(returns, baseline=rules.baseline)
    _, cell, sizes = torch.unique(torch.stack([group, place]), dim=1, return_inverse=True, return_counts=True)
    shared = sizes[cell] > 1
    out = torch.zeros_like(returns)
    out[shared] = group_advantages(
        returns[shared], cell[shared], baseline=row.baseline, scale=row.scale, ddof=row.ddof
    )
    for i in (~shared).nonzero()[:, 0].tolist():
        episodes = returns[(group == group[i]) & (place == 0)]
        against = group_advantages(
            torch.cat([episodes, returns[i : i + 1]]),
            torch.zeros(len(episodes) + 1, dtype=torch.long),
            baseline="leave_one_out",
            scale="none" if row.scale == "none" else "group_std",
            ddof=row.ddof,
        )
        out[i] = against[-1]
    return out


def _anchors(trajectories: Sequence[Trajectory], counts: Tensor) -> Tensor:
    """What each turn answered to, as a number: equal messages since the turn before are one anchor."""
    seen: list[str] = []
    for trajectory, n in zip(trajectories, counts.tolist()):
        said = [i for i, m in enumerate(trajectory.messages) if m.role == "assistant"][-n:]
        cuts = [0, *(i + 1 for i in said)]
        for start, end in zip(cuts, said):
            seen.append(repr([(m.role, m.content) for m in trajectory.messages[start:end]]))
    return numbered(seen)
