"""Preference losses: values by hand where the golden file has none, and the theory behind DPO."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_helpers import f64, flags, gradient, idx

from stepladder.objectives import estimators, kto, preference
from stepladder.objectives.reduce import merge_metrics

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_orpo_by_hand() -> None:
    """Averages −.5 and −1: P = .606531 and .367879, odds 1.541494 and .581977, log odds ratio .974077."""
    losses, metrics = preference.orpo(f64(-1.0), f64(-4.0), idx(2), idx(4), weight=0.1)
    assert metrics["log_odds_ratio"].item() == pytest.approx(0.974077, abs=1e-6)
    assert losses.item() == pytest.approx(0.5 - 0.1 * math.log(sigmoid(0.974077)), abs=1e-6)
    assert metrics["nll"].item() == pytest.approx(0.5)


def test_orpo_of_a_certain_answer_is_finite() -> None:
    lp = f64(0.0).requires_grad_()
    losses, _ = preference.orpo(lp, f64(-4.0), idx(2), idx(4))
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient(losses, lp)).all()


def test_simpo_ratio_is_gamma_over_beta() -> None:
    sums = (f64(-1.0), f64(-3.0), idx(2), idx(3))
    absolute = preference.simpo(*sums, beta=2.5, gamma=1.25)[0]
    assert torch.equal(preference.simpo(*sums, beta=2.5, gamma_beta_ratio=0.5)[0], absolute)
    assert preference.simpo(*sums, beta=2.5, gamma_beta_ratio=0.0)[0].item() == pytest.approx(
        -math.log(sigmoid(2.5 * 0.5))
    )


def test_length_normalised_dpo_by_hand() -> None:
    losses, metrics = preference.length_normalised_dpo(f64(2.0), f64(-1.0), idx(4), idx(2), beta=5.0)
    assert losses.item() == pytest.approx(-math.log(sigmoid(5.0)))  # .5 + .5
    assert metrics["margin"].item() == pytest.approx(5.0)


def test_extreme_margins_do_not_overflow() -> None:
    for sign in (1.0, -1.0):
        x = f64(sign * 1e5).requires_grad_()
        losses, _ = preference.dpo(x, f64(0.0), beta=1.0)
        assert losses.item() == (0.0 if sign > 0 else 1e5)
        assert gradient(losses, x).item() == (0.0 if sign > 0 else -1.0)


@quick
@given(
    reference=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    rewards=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    beta=st.floats(0.1, 3),
)
def test_the_optimal_policy_is_where_dpo_is_stationary(
    reference: list[float], rewards: list[float], beta: float
) -> None:
    """At π* the expected DPO loss under Bradley-Terry labels of r has gradient 0, and J = β·ln Z."""
    ref = torch.softmax(f64(reference), -1)
    r = f64(rewards)
    best = estimators.optimal_policy(ref, r, beta=beta)
    assert best.objective.item() == pytest.approx((beta * best.partition.log()).item(), abs=1e-9)
    z = best.probabilities.log().clone().requires_grad_()
    ratio = torch.log_softmax(z, -1) - ref.log()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            if i != j:
                p = torch.sigmoid(r[i] - r[j])
                total = total + p * preference.dpo(ratio[i : i + 1], ratio[j : j + 1], beta=beta)[0].sum()
    assert gradient(total, z).abs().max() < 1e-9


@quick
@given(
    reference=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    other=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    beta=st.floats(0.1, 3),
)
def test_no_policy_beats_the_optimal_one(reference: list[float], other: list[float], beta: float) -> None:
    ref, pi, r = torch.softmax(f64(reference), -1), torch.softmax(f64(other), -1), f64(1.0, 0.0, 2.0)
    value = (pi * r).sum() - beta * (pi * (pi.log() - ref.log())).sum()
    assert value <= estimators.optimal_policy(ref, r, beta=beta).objective + 1e-9


def test_kto_weights_and_sides() -> None:
    zero = torch.tensor(0.5, dtype=torch.float64)
    losses, metrics = kto.kto(
        f64(1.0, 1.0), flags(1, 0), zero, beta=2.0, desirable_weight=1.2, undesirable_weight=0.7
    )
    assert losses.tolist() == pytest.approx([1.2 * (1 - sigmoid(1.0)), 0.7 * (1 - sigmoid(-1.0))])
    assert metrics["reference_point"].item() == pytest.approx(1.0)
    assert metrics["reward_desirable"].item() == pytest.approx(2.0)
    assert metrics["reward_undesirable"].item() == pytest.approx(2.0)


def test_kto_reference_point_is_detached_and_clamped_after_the_mean() -> None:
    x = f64(3.0, -1.0).requires_grad_()
    z0 = kto.kto_reference_point(x)
    assert z0.item() == 1.0  # clamping first would give 1.5
    assert not z0.requires_grad
    y = f64(0.3).requires_grad_()
    point = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    kto.kto(y, flags(1), point)[0].sum().backward()
    assert point.grad is None


def test_kto_balance() -> None:
    assert kto.kto_balance(10, 20, desirable_weight=2.0, undesirable_weight=1.0) == 1.0
    assert kto.kto_balance(10, 10, desirable_weight=1.5, undesirable_weight=1.0) == 1.5


def test_metrics_are_detached() -> None:
    x = f64(1.0, 0.0).requires_grad_()
    for _, metrics in (preference.dpo(x, f64(0.0, 1.0)), preference.orpo(x - 2, x - 3, idx(1, 1), idx(1, 1))):
        assert not any(value.requires_grad for value in metrics.values())


def test_merged_metrics_take_the_maximum_where_the_name_says_so() -> None:
    parts = [
        {"ratio": f64(1.0)[0], "ratio_max": f64(3.0)[0], "tokens": idx(1)[0]},
        {"ratio": f64(2.0)[0], "ratio_max": f64(2.0)[0], "tokens": idx(3)[0]},
    ]
    merged = merge_metrics(parts)
    assert merged["ratio"].item() == 1.75
    assert merged["ratio_max"].item() == 3.0
    assert merged["tokens"].item() == 4
    assert merge_metrics([]) == {}
