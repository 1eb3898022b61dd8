"""Credit over tokens and turns: against plain loops, and unchanged by what the environment writes in
between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_helpers import f64, flags, idx
from torch import Tensor

from stepladder.objectives import credit

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def plain_gae(r: list[float], v: list[float], gamma: float, lam: float, last: float = 0.0) -> list[float]:
    """A_t = Σ_l (γλ)^l·δ_{t+l}, summed from its definition."""
    following = [*v[1:], last]
    delta = [r[t] + gamma * following[t] - v[t] for t in range(len(r))]
    return [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(r))) for t in range(len(r))]


def spread_out(values: list[float], mask: Tensor) -> Tensor:
    out = torch.full(mask.shape, 0.0, dtype=torch.float64)
    out[mask] = f64(values)
    return out


@quick
@given(
    seed=st.integers(0, 10**6),
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_observations_between_trained_tokens_change_nothing(
    seed: int, gaps: list[int], gamma: float, lam: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    count = len(gaps)
    r, v = (torch.randn(count, generator=g, dtype=torch.float64).tolist() for _ in range(2))
    mask = torch.tensor([[flag for gap in gaps for flag in [True] + [False] * gap]])
    values = torch.where(mask, spread_out(v, mask), torch.full(mask.shape, 1e6, dtype=torch.float64))
    a, returns = credit.gae(spread_out(r, mask), values, mask, gamma=gamma, lam=lam)
    expected = plain_gae(r, v, gamma, lam)
    assert a[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert returns[mask].tolist() == pytest.approx(
        [x + y for x, y in zip(expected, v, strict=True)], abs=1e-9
    )
    assert (a[~mask] == 0).all()


@quick
@given(seed=st.integers(0, 10**6), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_truncation_bootstraps_from_the_state_reached(seed: int, gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(seed)
    r, v = (torch.randn(1, 4, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(1, 4, dtype=torch.bool)
    a, _ = credit.gae(r, v, mask, gamma=gamma, lam=lam, truncated=flags(1), final_values=f64(0.9))
    assert a[0].tolist() == pytest.approx(plain_gae(r[0].tolist(), v[0].tolist(), gamma, lam, 0.9), abs=1e-9)


def test_lambda_one_is_the_return_minus_the_value() -> None:
    r, v, mask = f64([[0.1, 0.2, 0.3]]), f64([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    a, returns = credit.gae(r, v, mask, gamma=0.5, lam=1.0)
    assert torch.allclose(returns, credit.token_returns(r, mask, gamma=0.5))
    assert torch.allclose(a, returns - v)


def test_token_returns_are_discounted_per_trained_token() -> None:
    mask = flags(1, 0, 0, 1).unsqueeze(0)
    returns = credit.token_returns(f64([[0.0, 0.0, 0.0, 1.0]]), mask, gamma=0.5)
    assert returns[0].tolist() == [0.5, 0.0, 0.0, 1.0]


def test_the_score_stands_at_the_last_trained_token() -> None:
    mask = torch.stack([flags(1, 1, 0, 0), flags(0, 1, 0, 1), flags(0, 0, 0, 0)])
    rewards = credit.kl_penalised_rewards(
        f64(1.0, 2.0, 3.0), torch.zeros(3, 4).double(), mask, coefficient=0.1
    )
    assert rewards.tolist() == [[0, 1, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_folding_keeps_the_sum_that_follows_the_first_action() -> None:
    rewards, mask = f64([[5.0, 1.0, 2.0, 3.0, 4.0]]), flags(0, 1, 0, 1, 0).unsqueeze(0)
    assert credit.fold_rewards(rewards, mask)[0].tolist() == [0.0, 3.0, 0.0, 7.0, 0.0]


def test_turn_returns_of_interleaved_trajectories() -> None:
    returns = credit.turn_returns(f64(1.0, 10.0, 2.0, 20.0), idx(7, 3, 7, 3), gamma=0.5)
    assert returns.tolist() == [2.0, 20.0, 2.0, 20.0]


def test_turn_advantages_reach_their_own_tokens() -> None:
    turns = torch.tensor([[-1, 0, 0, -1, 1], [2, -1, -1, -1, -1]])
    assert credit.spread_turns(f64(0.5, -0.5, 2.0), turns).tolist() == [
        [0, 0.5, 0.5, 0, -0.5],
        [2, 0, 0, 0, 0],
    ]


def test_bilevel_sees_turns_without_reward_and_skips_observations() -> None:
    """Two turns, the first without reward: turn level V 0.2, 0.4; δ₂ = 1 − .4, A₂ = .6; A₁ = .5·.4 − .2 +
    .5·.6 = .3.

    Returns .5 and 1; inside a turn (γ = λ = 1) every token gets return − V.
    """
    turns = torch.tensor([[0, 0, -1, 1, -1]])
    values, rewards = f64([[0.1, 0.2, 9.0, 0.4, 9.0]]), f64([[0.0, 0.0, 0.0, 0.0, 1.0]])
    a, returns = credit.bilevel_gae(rewards, values, turns, turn_gamma=0.5)
    assert a[0].tolist() == pytest.approx([0.4, 0.3, 0.0, 0.6, 0.0])
    assert returns[0].tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0, 0.0])


def test_bilevel_with_inner_discount_is_gae_of_the_turns_own_return() -> None:
    turns, values = torch.tensor([[0, 0, 0]]), f64([[0.1, 0.2, 0.4]])
    rewards = f64([[0.3, 0.0, 0.7]])  # a turn's rewards are summed: R = 1
    a, _ = credit.bilevel_gae(rewards, values, turns, gamma=0.9, lam=0.8, turn_gamma=0.5)
    assert a[0].tolist() == pytest.approx(plain_gae([0.0, 0.0, 1.0], [0.1, 0.2, 0.4], 0.9, 0.8))


def test_gigpo_statistics_are_per_trajectory() -> None:
    """A long and a short trajectory: the episode mean is ½, whatever the number of turns; lone anchors add
    0."""
    rewards, trajectory = f64(0.0, 0.0, 0.0, 1.0, 0.0), idx(0, 0, 0, 0, 1)
    a = credit.gigpo_advantages(rewards, trajectory, idx(0, 0, 0, 0, 0), idx(0, 1, 2, 3, 4))
    assert a.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, -0.5])
    half = credit.gigpo_advantages(
        f64(1.0, 0.0), idx(0, 1), idx(0, 0), idx(9, 9), gamma=0.5, omega=0.5
    )  # one turn each at one anchor: ±.5 and ½·(±.5)
    assert half.tolist() == pytest.approx([0.75, -0.75])


def test_gigpo_anchors_of_other_prompts_do_not_mix() -> None:
    rewards, trajectory, group = f64(1.0, 0.0, 3.0, 1.0), idx(0, 1, 2, 3), idx(0, 0, 1, 1)
    together = credit.gigpo_advantages(rewards, trajectory, group, idx(5, 5, 5, 5))
    apart = credit.gigpo_advantages(rewards, trajectory, group, idx(5, 5, 6, 6))
    assert torch.equal(together, apart)
    assert together.tolist() == pytest.approx([1.0, -1.0, 2.0, -2.0])  # episode ±.5, ±1 and the same per step


def test_gigpo_equal_rewards_give_zero() -> None:
    r = torch.full((4,), 1.15)
    a = credit.gigpo_advantages(
        r, idx(0, 1, 2, 3), idx(0, 0, 0, 0), idx(1, 1, 1, 1), scale="group_std", step_eps=1e-8
    )
    assert a.tolist() == [0.0] * 4
