"""From groups to a batch: rewards become advantages, trajectories become rows.

    score, KL ─> rewards of turns or tokens ─> returns or estimates ─> advantages ─> domains ─> whitening

What is computed is in `stepladder.objectives`; here it is decided what belongs to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepladder.algorithms import Algorithm
from stepladder.objectives.advantages import constant_advantages, group_advantages, whiten
from stepladder.objectives.credit import bilevel_gae, gae, token_returns
from stepladder.objectives.domains import (
    domain_zscores,
    environment_scaled_advantages,
    task_normalised_advantages,
)
from stepladder.rungs.episodes import value_of
from stepladder.rungs.rl.trained_tokens import TokenTable
from stepladder.rungs.rl.turn_credit import (
    CreditRules,
    Episodes,
    numbered,
    own_advantages,
    token_rewards,
    turn_advantages,
)
from stepladder.rungs.rl.turn_sequences import by_turns
from stepladder.rungs.rl.update import RlBatch
from stepladder.types import Group, Trajectory


@dataclass(slots=True)
class MeasuredColumns:
    """What models say about a batch before credit is given, [n, T] in its rows' layout.

    kl: k1 = behaviour - reference in nats. values: the critic's. final_values [N]: its value of the state
    in which each trajectory ended. A model that is not there leaves zeros: at the start of a run the
    reference is the policy and a new critic says 0, so that is what they would say.
    """

    kl: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None


def make_batch(
    groups: Sequence[Group],
    row: Algorithm,
    rules: CreditRules | None = None,
    *,
    measure: Callable[[RlBatch], MeasuredColumns] | None = None,
) -> RlBatch:
    """Rewards to advantages to rows. Failed and unscored trajectories take no part, and count for nothing.

    Neither do episodes in which the policy said nothing (no room for a single token). Where the baseline
    comes from the group, one with fewer than two members left has none and is left out.
    """
    rules = rules or CreditRules()
    episodes = _episodes(groups, alone=not needs_siblings(row, rules))
    samples, owner = [], []
    for i, trajectory in enumerate(episodes.trajectories):
        for sample in trajectory.samples:
            if sample.num_trained:
                samples.append(sample)
                owner.append(i)
    owners = torch.tensor(owner, dtype=torch.long)
    batch = RlBatch(samples, torch.zeros(len(samples)), owners, episodes.group[owners])
    if not samples:
        return batch
    measured = measure(batch) if measure is not None else MeasuredColumns()
    table = TokenTable(samples, owners, len(episodes.trajectories))
    if measured.kl is not None:
        batch.measured["kl_reward"] = float(measured.kl.double().sum()) / len(episodes.trajectories)
    advantages = _advantages(episodes, table, row, rules, measured, batch)
    if rules.normalise == "task":
        advantages = _by_task(advantages, episodes, table)
    if row.whiten:
        advantages = whiten(_per_token(advantages, table), table.mask)
    per_row = table.scatter(advantages) if advantages.dim() == 2 else advantages[owners]
    batch.advantages = per_row.float()
    return by_turns(batch) if row.sequence == "turn" else batch


def needs_siblings(row: Algorithm, rules: CreditRules) -> bool:
    """Does the baseline come from the other members of the group?"""
    if rules.own is not None or rules.normalise == "domain":
        return False
    if rules.normalise == "environment":  # divides by the world's deviation, and takes off the group's mean
        return True
    return row.advantage == "group" or row.baseline != "none" or rules.credit in ("process", "gigpo")


def environment_of(domain: str) -> str:
    """The world of a domain: what stands before the first "/" where several worlds were joined.

    >>> environment_of("calculator/addition"), environment_of("default")
    ('calculator', 'default')
    """
    return domain.partition("/")[0]


# -- who takes part ------------------------------------------------------------------------------------------


def _episodes(groups: Sequence[Group], *, alone: bool) -> Episodes:
    trajectories: list[Trajectory] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        usable = [t for t in group.trajectories if _usable(t)]
        if len(usable) >= 2 or alone:
            trajectories += usable
            group_of += [g] * len(usable)
    return Episodes(
        trajectories,
        torch.tensor([value_of(t) for t in trajectories], dtype=torch.float64),
        torch.tensor(group_of, dtype=torch.long),
        numbered([t.task.domain for t in trajectories]),
        numbered([environment_of(t.task.domain) for t in trajectories]),
    )


def _usable(trajectory: Trajectory) -> bool:
    scored = trajectory.failure is None and trajectory.score.value is not None
    return scored and any(sample.num_trained for sample in trajectory.samples)


# -- advantages ----------------------------------------------------------------------------------------------


def _advantages(
    episodes: Episodes,
    table: TokenTable,
    row: Algorithm,
    rules: CreditRules,
    measured: MeasuredColumns,
    batch: RlBatch,
) -> Tensor:
    """[N], one for each trajectory, or [N, K], one for each trained token."""
    kl = torch.zeros(table.mask.shape, dtype=torch.float64)
    if measured.kl is not None:
        kl = rules.kl_coefficient * table.gather(measured.kl).double()
    if rules.own is not None:
        return own_advantages(rules.own, episodes, table)
    if row.advantage == "gae":
        rewards = token_rewards(episodes, table, rules, episodes.scores) - kl
        return _with_critic(rewards, episodes, table, rules, measured, batch)
    if row.advantage == "batch_whiten":
        scores = episodes.scores
        if row.baseline != "none":
            scores = group_advantages(scores, episodes.group, baseline=row.baseline, scale="none")
        rewards = token_rewards(episodes, table, rules, scores) - kl
        return whiten(token_returns(rewards, table.mask, gamma=rules.gamma), table.mask, ddof=row.ddof)
    if rules.credit == "outcome":
        return _of_episodes(episodes.scores - kl.sum(dim=1), episodes, row, rules)
    return turn_advantages(kl, episodes, table, row, rules)


def _of_episodes(rewards: Tensor, episodes: Episodes, row: Algorithm, rules: CreditRules) -> Tensor:
    if rules.normalise == "domain":
        return _by_domain(rewards, episodes.domain)
    if rules.normalise == "environment":
        return environment_scaled_advantages(rewards, episodes.group, episodes.environment)
    if row.advantage == "constant":
        return constant_advantages(rewards, baseline=rules.baseline)
    return group_advantages(rewards, episodes.group, baseline=row.baseline, scale=row.scale, ddof=row.ddof)


def _by_domain(rewards: Tensor, domain: Tensor) -> Tensor:
    """z-scores; 0 where an episode is the only one of its domain that is left: nothing says what is usual."""
    several = torch.bincount(domain)[domain] > 1
    advantages = torch.zeros_like(rewards)
    advantages[several] = domain_zscores(rewards[several], domain[several])
    return advantages


def _with_critic(
    rewards: Tensor,
    episodes: Episodes,
    table: TokenTable,
    rules: CreditRules,
    measured: MeasuredColumns,
    batch: RlBatch,
) -> Tensor:
    zeros = torch.zeros(table.mask.shape, dtype=torch.float64)
    values = zeros if measured.values is None else table.gather(measured.values).double()
    if rules.credit == "bilevel":
        advantages, returns = bilevel_gae(
            rewards,
            values,
            table.turns,
            gamma=rules.gamma,
            lam=rules.lam,
            turn_gamma=rules.turn_gamma,
            turn_lam=rules.turn_lam,
        )
    else:
        final = torch.zeros(len(rewards), dtype=torch.float64)
        if measured.final_values is not None:
            final = measured.final_values.double()
        cut = torch.tensor([_goes_on(t, rules.bootstrap) for t in episodes.trajectories])
        advantages, returns = gae(
            rewards,
            values,
            table.mask,
            gamma=rules.gamma,
            lam=rules.lam,
            truncated=cut,
            final_values=final,
        )
    batch.values, batch.returns = table.scatter(values).float(), table.scatter(returns).float()
    return advantages


def _goes_on(trajectory: Trajectory, bootstrap: str) -> bool:
    """Would the state in which the episode ended have been worth something, had it gone on?"""
    if bootstrap == "never":
        return False
    return (
        trajectory.truncated
        if bootstrap == "always"
        else trajectory.stop_reason in ("truncated", "max_turns")
    )


# -- rewards and normalisation -------------------------------------------------------------------------------


def _per_token(advantages: Tensor, table: TokenTable) -> Tensor:
    return advantages if advantages.dim() == 2 else advantages[:, None] * table.mask


def _by_task(advantages: Tensor, episodes: Episodes, table: TokenTable) -> Tensor:
    """AgentRL: mean 0 and deviation 1 over all token advantages of a kind of task."""
    if advantages.dim() == 1:
        return task_normalised_advantages(advantages, table.counts, episodes.domain)
    flat = advantages[table.mask]
    kind = episodes.domain[:, None].expand_as(table.mask)[table.mask]
    out = torch.zeros_like(advantages)
    out[table.mask] = task_normalised_advantages(flat, torch.ones_like(kind), kind)
    return out
