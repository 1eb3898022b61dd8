"""Estimators against enumeration of everything that can happen."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_helpers import f64

from stepladder.objectives import estimators, overoptimisation
from stepladder.objectives.kl import exact_kl

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@quick
@given(n=st.integers(1, 7), data=st.data())
def test_pass_and_max_at_k_are_means_over_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = [1.0] * c + [0.0] * (n - c)
    subsets = list(itertools.combinations(right, k))
    assert estimators.pass_at_k(n, c, k) == pytest.approx(sum(max(s) for s in subsets) / len(subsets))
    scores = data.draw(st.lists(st.floats(-5, 5), min_size=n, max_size=n))
    subsets = list(itertools.combinations(scores, k))
    expected = sum(max(s) for s in subsets) / len(subsets)
    assert estimators.max_at_k(f64(scores), k) == pytest.approx(expected, abs=1e-9)
    assert estimators.max_at_k(f64(right), k) == pytest.approx(estimators.pass_at_k(n, c, k), abs=1e-12)


@quick
@given(n=st.integers(2, 7), data=st.data())
def test_pass_at_k_weights_are_means_over_the_subsets_a_sample_is_in(n: int, data: st.DataObject) -> None:
    """A sample's weight: (1/C(n,k))·Σ over k-subsets containing it of the subset's pass, times n·k/n... =
    k/n·mean."""
    c, k = data.draw(st.integers(1, n - 1)), data.draw(st.integers(1, n))
    right = [1.0] * c + [0.0] * (n - c)
    with_first = [max(s) for s in itertools.combinations(right[1:], k - 1)] if k > 1 else [0.0]
    wrong_one = [max(s) for s in itertools.combinations(right[:-1], k - 1)] if k > 1 else [0.0]
    weights = estimators.pass_at_k_weights(n, c, k)
    assert len(with_first) > 0
    assert weights[0] == pytest.approx(k / n)
    assert weights[1] == pytest.approx(k / n * sum(wrong_one) / len(wrong_one))


@quick
@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=4),
    n=st.integers(1, 4),
    ties=st.booleans(),
    data=st.data(),
)
def test_best_of_n_distribution_and_its_bound(
    logits: list[float], n: int, ties: bool, data: st.DataObject
) -> None:
    p = torch.softmax(f64(logits), -1)
    m = len(logits)
    scores = [float(i // 2 if ties else i) for i in range(m)]
    best = estimators.best_of_n_distribution(p, f64(scores), n)
    expected = [0.0] * m
    for draws in itertools.product(range(m), repeat=n):
        chance = math.prod(p[i].item() for i in draws)
        winners = [i for i in draws if scores[i] == max(scores[j] for j in draws)]
        for i in winners:
            expected[i] += chance / len(winners)
    assert best.tolist() == pytest.approx(expected)
    assert exact_kl(best.log(), p.log()).item() <= estimators.best_of_n_kl(n) + 1e-9


def test_votes_break_ties_by_first_sight() -> None:
    assert estimators.majority_vote(["b", "a", "a", "b"]) == "b"
    assert estimators.majority_vote(["a", "b", "b", "a"]) == "a"
    assert estimators.weighted_vote(["x", "y"], [0.5, 0.5]) == "x"
    assert estimators.best_of_n(["x", "y", "z"], [0.1, 0.9, 0.9]) == "y"
    assert estimators.majority_vote(["3", "2", "2", "1"]) == "2"


@quick
@given(p=st.floats(0, 1), half=st.integers(0, 4))
def test_majority_success_is_a_sum_over_all_outcomes(p: float, half: int) -> None:
    n = 2 * half + 1
    total = 0.0
    for votes in itertools.product((0, 1), repeat=n):
        if sum(votes) > n / 2:
            total += math.prod(p if vote else 1 - p for vote in votes)
    assert estimators.majority_success(p, n) == pytest.approx(total, abs=1e-12)


@quick
@given(alpha=st.floats(0.1, 3), beta=st.floats(0.1, 1))
def test_fits_recover_the_curves_and_peaks_are_peaks(alpha: float, beta: float) -> None:
    d = f64([1.0, 1.7, 2.5, 4.0, 7.0])
    pairs = (
        (overoptimisation.rl_gold_reward, overoptimisation.rl_peak, overoptimisation.fit_rl),
        (
            overoptimisation.best_of_n_gold_reward,
            overoptimisation.best_of_n_peak,
            overoptimisation.fit_best_of_n,
        ),
    )
    for curve, peak, fit in pairs:
        found = fit(d, curve(d, alpha=alpha, beta=beta))
        assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
        top = peak(alpha=alpha, beta=beta)
        x = f64(top.distance).requires_grad_()
        y = curve(x, alpha=alpha, beta=beta)
        y.sum().backward()
        assert y.item() == pytest.approx(top.reward, rel=1e-6)
        assert x.grad.item() == pytest.approx(0.0, abs=1e-9)
        at_zero = curve(f64(top.zero), alpha=alpha, beta=beta).item()
        assert at_zero == pytest.approx(0.0, abs=1e-9 * top.zero)
        assert curve(f64(0.0), alpha=alpha, beta=beta).item() == 0.0


def test_naive_pass_at_k_is_biased_low() -> None:
    assert estimators.naive_pass_at_k(10, 3, 5) < estimators.pass_at_k(10, 3, 5)
    assert estimators.naive_pass_at_k(10, 3, 1) == pytest.approx(estimators.pass_at_k(10, 3, 1))
