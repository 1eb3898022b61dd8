"""Credit inside a trajectory: token returns, generalised advantage estimation, turns, anchor states.

Tokens: padded [B, T] with a mask that is True exactly on tokens the policy sampled. Observations between
turns are bridged: what follows a trained token is the next *trained* token, so the length of a tool's
answer changes nothing. Turns: flat, one entry per turn, in order, with `trajectory_index` saying whose turn
it is. Statistics in float64."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import (
    require_bool,
    require_choice,
    require_finite,
    require_float,
    require_per_row,
    require_same_shape,
    zero_where_masked,
)
from .advantages import class_statistics, group_advantages

Observations = Literal["bridge", "zero"]


def kl_penalised_rewards(
    scores: Float[Tensor, "B"], kl: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, coefficient: float
) -> Float[Tensor, "B T"]:
    """r_t = −β·k1_t, plus the score at the row's last trained token (not at the last column, which may be
    padding).

    `kl` is k1 = lp_old − lp_ref in nats (arXiv:2203.02155). An unscorable row (score NaN) gets no reward at
    all: mask it out of the step."""
    require_same_shape(kl=kl, mask=mask)
    require_bool(mask)
    require_per_row(mask, scores=scores)
    require_float(kl=kl)
    require_finite(mask, kl=kl)
    if torch.isinf(scores).any():
        raise ValueError("scores hold an infinite value; use NaN for a trajectory that could not be scored")
    if not coefficient >= 0:
        raise ValueError(f"coefficient must not be negative, got {coefficient}; for example 0.02")
    scorable = ~torch.isnan(scores)
    rewards = -coefficient * zero_where_masked(mask, kl.detach())
    terminal = torch.where(scorable, scores, torch.zeros_like(scores)).to(rewards.dtype)
    rewards = rewards + terminal.unsqueeze(-1) * _last_trained(mask)
    return zero_where_masked(mask & scorable.unsqueeze(-1), rewards)


def fold_rewards(rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Rewards that stand on observation tokens move to the last trained token before them, undiscounted.

    A reward often arrives with the environment's closing text; left there, γ < 1 or a masked recursion
    would lose it. What stands before the first trained token cannot depend on the policy and is dropped.
    Rewards outside the mask therefore count: padding must hold 0 there, NaN raises.
    """
    require_same_shape(rewards=rewards, mask=mask)
    require_bool(mask)
    require_float(rewards=rewards)
    position = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    owner = torch.where(mask, position, -1).cummax(dim=-1).values
    missing = int((~torch.isfinite(rewards) & (owner >= 0)).sum())
    if missing:
        raise ValueError(
            f"rewards has {missing} non-finite value(s) at or after the first trained token; observations' "
            "rewards count, so fill padding with 0 and mask out rows that could not be scored"
        )
    owned = zero_where_masked(owner >= 0, rewards)
    folded = torch.zeros_like(rewards).scatter_add(-1, owner.clamp(min=0), owned)
    return zero_where_masked(mask, folded)


def token_returns(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, gamma: float = 1.0
) -> Float[Tensor, "B T"]:
    """G_t = r_t + γ·G_{next trained token} (REINFORCE++, arXiv:2501.03262), 0 where the mask is False."""
    _require_discounts(gamma=gamma)
    folded = fold_rewards(rewards, mask).double()
    returns = torch.zeros_like(folded)
    following = torch.zeros(len(folded), dtype=folded.dtype, device=folded.device)
    for t in reversed(range(folded.shape[1])):
        following = torch.where(mask[:, t], folded[:, t] + gamma * following, following)
        returns[:, t] = following
    return zero_where_masked(mask, returns).to(rewards.dtype)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    truncated: Bool[Tensor, "B"] | None = None,
    final_values: Float[Tensor, "B"] | None = None,
    observations: Observations = "bridge",
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """(advantages, returns): δ_t = r_t + γV' − V_t, A_t = δ_t + γλA', returns = A + V from before any
    whitening.

    V' and A' are those of the next trained token (arXiv:1506.02438; verl does the same, with observation
    tokens bridged). After the last one V' is 0 if the episode terminated and `final_values` [B], the
    critic's value of the state reached, where `truncated`: being cut off is no failure. Rewards on
    observation tokens are folded back (`fold_rewards`). `observations="zero"` is OpenRLHF's form, for
    comparison only: values of observation tokens count as 0 and are bootstrapped from at every turn
    boundary."""
    require_choice("observations", observations, get_args(Observations))
    require_same_shape(rewards=rewards, values=values, mask=mask)
    require_float(values=values)
    _require_discounts(gamma=gamma, lam=lam)
    require_finite(mask, rewards=rewards, values=values.detach())
    v = zero_where_masked(mask, values.detach()).double()
    folded = fold_rewards(rewards, mask) if observations == "bridge" else zero_where_masked(mask, rewards)
    r = folded.double()
    advantages = torch.zeros_like(v)
    next_value = _bootstrap(truncated, final_values, v)
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(v.shape[1])):
        delta = r[:, t] + gamma * next_value - v[:, t]
        advantage = delta + gamma * lam * next_advantage
        moves = mask[:, t] if observations == "bridge" else torch.ones_like(mask[:, t])
        next_value = torch.where(moves, v[:, t], next_value)
        next_advantage = torch.where(moves, advantage, next_advantage)
        advantages[:, t] = advantage
    advantages = zero_where_masked(mask, advantages)
    return advantages.to(values.dtype), (advantages + v).to(values.dtype)


def bilevel_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    turn_index: Int[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """(advantages, returns): estimation over turns, whose returns then end each turn of an estimation over
    tokens.

        turns   δ_k = R_k + γ_turn·V_{k+1} − V_k,  A_k = δ_k + γ_turn·λ_turn·A_{k+1}
                with V_k the value at the turn's last token
        tokens  r = A_k + V_k at the turn's last token, 0 before it; γ, λ inside the turn, none across its end

    RAGEN (arXiv:2504.20073), which finds the ends of turns by non-zero rewards and so misses turns without
    one; here `turn_index` [B, T] numbers the turns of trained tokens and is −1 elsewhere. R_k sums the
    turn's rewards."""
    require_same_shape(rewards=rewards, values=values, turn_index=turn_index)
    require_float(values=values)
    _require_discounts(gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    mask = turn_index >= 0
    require_finite(mask, rewards=rewards, values=values.detach())
    v, folded = zero_where_masked(mask, values.detach()).double(), fold_rewards(rewards, mask).double()
    turn_total = _sum_per_turn(folded, turn_index)
    ends = _turn_ends(turn_index)
    zero = torch.zeros(len(v), dtype=v.dtype, device=v.device)
    targets = torch.zeros_like(v)
    next_value, next_advantage = zero, zero
    for t in reversed(range(v.shape[1])):
        advantage = turn_total[:, t] + turn_gamma * (next_value + turn_lam * next_advantage) - v[:, t]
        next_value = torch.where(ends[:, t], v[:, t], next_value)
        next_advantage = torch.where(ends[:, t], advantage, next_advantage)
        targets[:, t] = torch.where(ends[:, t], advantage + v[:, t], zero)
    advantages = torch.zeros_like(v)
    next_value, next_advantage = zero, zero
    for t in reversed(range(v.shape[1])):
        next_value = torch.where(ends[:, t], zero, next_value)
        next_advantage = torch.where(ends[:, t], zero, next_advantage)
        advantage = targets[:, t] + gamma * (next_value + lam * next_advantage) - v[:, t]
        next_value = torch.where(mask[:, t], v[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = advantage
    advantages = zero_where_masked(mask, advantages)
    return advantages.to(values.dtype), (advantages + v).to(values.dtype)


def turn_returns(
    turn_rewards: Float[Tensor, "n"], trajectory_index: Int[Tensor, "n"], *, gamma: float = 1.0
) -> Float[Tensor, "n"]:
    """G_k = Σ_{j≥k} γ^(j−k)·r_j over the later turns of the same trajectory, discounted per turn, not per
    token.

    Subtract a baseline for the advantage of turn k; `spread_turns` gives it to the turn's tokens.
    """
    require_same_shape(turn_rewards=turn_rewards, trajectory_index=trajectory_index)
    require_float(turn_rewards=turn_rewards)
    _require_discounts(gamma=gamma)
    require_finite(torch.ones_like(turn_rewards, dtype=torch.bool), turn_rewards=turn_rewards)
    following: dict[int, float] = {}
    returns = []
    rewards = turn_rewards.double().tolist()
    for reward, trajectory in zip(reversed(rewards), reversed(trajectory_index.tolist()), strict=True):
        following[trajectory] = reward + gamma * following.get(trajectory, 0.0)
        returns.append(following[trajectory])
    return torch.tensor(returns[::-1], dtype=turn_rewards.dtype, device=turn_rewards.device)


def spread_turns(turn_advantages: Float[Tensor, "n"], turn_index: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """A_t = advantage of the turn that sampled token t: `turn_index` points into `turn_advantages`, −1
    gives 0."""
    if turn_index.numel() and int(turn_index.max()) >= len(turn_advantages):
        raise ValueError(
            f"turn_index goes up to {int(turn_index.max())}, but there are "
            f"{len(turn_advantages)} turn advantages"
        )
    if len(turn_advantages) == 0:
        return torch.zeros(turn_index.shape, dtype=turn_advantages.dtype, device=turn_advantages.device)
    return zero_where_masked(turn_index >= 0, turn_advantages[turn_index.clamp(min=0)])


def process_advantages(
    step_rewards: Float[Tensor, "n"],
    trajectory_index: Int[Tensor, "n"],
    group_index: Int[Tensor, "n"],
    *,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "n"]:
    """A_k = Σ_{j≥k} (r_j − mean)/(std + eps), statistics over all steps of the group together.

    GRPO with process rewards (arXiv:2402.03300, §4.1.3); the sum runs to the end of the step's trajectory.

    Steps stand in order; equal step rewards in a group give exactly 0.
    """
    standardised = group_advantages(step_rewards, group_index, ddof=ddof, eps=eps)
    return turn_returns(standardised, trajectory_index)


def gigpo_advantages(
    turn_rewards: Float[Tensor, "n"],
    trajectory_index: Int[Tensor, "n"],
    group_index: Int[Tensor, "n"],
    anchor_index: Int[Tensor, "n"],
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: Literal["none", "group_std"] = "none",
    ddof: int = 1,
    episode_eps: float = 0.0,
    step_eps: float = 1e-6,
) -> Float[Tensor, "n"]:
    """A = A_episode + ω·A_step, one per turn (GiGPO, arXiv:2505.10978).

    A_episode: the trajectory's summed reward relative to its group, statistics over trajectories (early
    code counted a trajectory once per step). A_step: the turn's discounted return relative to the turns of
    the same group whose observation is the same (`anchor_index`, for example a hash); a turn alone at its
    anchor gets 0. `scale` "none" subtracts means only (verl-agent's default), "group_std" divides too. ω 1
    (older code .8)."""
    require_same_shape(
        turn_rewards=turn_rewards,
        trajectory_index=trajectory_index,
        group_index=group_index,
        anchor_index=anchor_index,
    )
    require_float(turn_rewards=turn_rewards)
    _, trajectory = torch.unique(trajectory_index, return_inverse=True)
    count = int(trajectory.max()) + 1 if trajectory.numel() else 0
    episode = torch.zeros(count, dtype=torch.float64, device=turn_rewards.device)
    episode = episode.index_add(0, trajectory, turn_rewards.double())
    episode_group = torch.zeros(count, dtype=torch.long, device=turn_rewards.device)
    episode_group[trajectory] = group_index.long()
    of_episode = group_advantages(episode, episode_group, scale=scale, ddof=ddof, eps=episode_eps)
    returns = turn_returns(turn_rewards.double(), trajectory_index, gamma=gamma)
    _, anchor = torch.unique(torch.stack([group_index, anchor_index]), dim=1, return_inverse=True)
    everyone = torch.ones_like(returns, dtype=torch.bool)
    members, mean, std, equal = class_statistics(returns, anchor, everyone, ddof=ddof)
    of_step = torch.where(equal | (members < 2), torch.zeros_like(returns), returns - mean)
    if scale == "group_std":
        of_step = torch.where(std + step_eps > 0, of_step / (std + step_eps), torch.zeros_like(of_step))
    return (of_episode[trajectory] + omega * of_step).to(turn_rewards.dtype)


def _last_trained(mask: Tensor) -> Tensor:
    trained_from_here = mask.flip(-1).cumsum(dim=-1).flip(-1)
    return mask & (trained_from_here == 1)


def _bootstrap(truncated: Tensor | None, final_values: Tensor | None, v: Tensor) -> Tensor:
    zero = torch.zeros(v.shape[0], dtype=v.dtype, device=v.device)
    if truncated is None and final_values is None:
        return zero
    if truncated is None or final_values is None:
        raise ValueError(
            "give truncated and final_values together: which rows were cut off, and the value there"
        )
    require_same_shape(truncated=truncated, final_values=final_values, rows=v[:, :1].sum(-1))
    require_finite(truncated, final_values=final_values.detach())
    return torch.where(truncated, final_values.detach().double(), zero)


def _turn_ends(turn_index: Tensor) -> Tensor:
    """True at the last trained token of each turn, observations in between notwithstanding."""
    ends = torch.zeros_like(turn_index, dtype=torch.bool)
    following = torch.full((len(turn_index),), -1, dtype=turn_index.dtype, device=turn_index.device)
    for t in reversed(range(turn_index.shape[1])):
        current = turn_index[:, t]
        ends[:, t] = (current >= 0) & (current != following)
        following = torch.where(current >= 0, current, following)
    return ends


def _sum_per_turn(rewards: Tensor, turn_index: Tensor) -> Tensor:
    """For each trained token the summed reward of its turn, [B, T]."""
    if turn_index.numel() == 0:
        return rewards
    width = int(turn_index.max()) + 1
    slot = torch.where(turn_index >= 0, turn_index, width).long()
    totals = torch.zeros(len(rewards), width + 1, dtype=rewards.dtype, device=rewards.device)
    return totals.scatter_add(-1, slot, rewards).gather(-1, slot)


def _require_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {value}; for example {name}=0.95")
