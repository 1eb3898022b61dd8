"""Divergences: expectations taken exactly over small spaces, never sampled."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_helpers import f64, flags, gradient, idx, padded
from torch import Tensor

from stepladder.objectives import kl
from stepladder.objectives.distillation import generalised_js

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)
logit = st.floats(-4, 4)
triples = st.lists(logit, min_size=3, max_size=3)


def logp(values: list[float]) -> Tensor:
    return torch.log_softmax(f64(values), -1)


def row(values: Tensor, reference: Tensor, estimator: str, sampling: Tensor | None = None) -> Tensor:
    mask = torch.ones(1, len(values), dtype=torch.bool)
    sampled = None if sampling is None else sampling.unsqueeze(0)
    return kl.kl_estimate(
        values.unsqueeze(0), reference.unsqueeze(0), mask, estimator=estimator, sampling_logprobs=sampled
    )[0]


@quick
@given(p=triples, q=triples)
def test_values_in_expectation(p: list[float], q: list[float]) -> None:
    a, b = logp(p), logp(q)
    exact = kl.exact_kl(a, b)
    assert torch.allclose((a.exp() * row(a, b, "k1")).sum(), exact, atol=1e-9)
    assert torch.allclose((a.exp() * row(a, b, "k3")).sum(), exact, atol=1e-9)
    assert (row(a, b, "k3") >= 0).all()
    assert (row(a, b, "k2") >= 0).all()
    assert exact >= -1e-12


@quick
@given(p=triples, q=triples, old=triples)
def test_the_off_policy_form_is_unbiased_in_value_and_gradient(
    p: list[float], q: list[float], old: list[float]
) -> None:
    z = f64(p).requires_grad_()
    current, reference, sampler = torch.log_softmax(z, -1), logp(q), logp(old)
    for estimator in ("k1", "k3"):
        estimate = (sampler.exp() * row(current, reference, estimator, sampler)).sum()
        exact = kl.exact_kl(current, reference)
        assert torch.allclose(estimate, exact, atol=1e-8)
        assert torch.allclose(gradient(estimate, z), gradient(exact, z), atol=1e-7)


def test_the_clamp_keeps_k3_finite_and_monotone() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    values = kl.kl_estimate(f64([[-900.0, -30.0, -25.0]]), f64([[-1.0, -1.0, -1.0]]), mask)
    assert torch.isfinite(values).all()
    assert values.min() > 1e8


def two_token_policy(z: Tensor) -> Tensor:
    """log p of both tokens for the four sequences of two binary tokens, [4, 2]; z holds 1 + 2 logits."""
    first = torch.nn.functional.logsigmoid(torch.stack([z[0], -z[0]]))
    second = torch.nn.functional.logsigmoid(torch.stack([z[1:], -z[1:]]))
    return torch.stack(
        [torch.stack([first[a], second[b, a]]) for a, b in itertools.product((0, 1), repeat=2)]
    )


def test_summed_token_estimates_do_not_have_the_gradient_of_the_sequence_kl_but_sequence_k2_has() -> None:
    z = f64(0.3, -0.8, 1.1).requires_grad_()
    lp, ref = two_token_policy(z), two_token_policy(f64(-0.5, 0.9, 0.2))
    weight = lp.detach().sum(-1).exp()
    assert weight.sum().item() == pytest.approx(1.0)
    mask = torch.ones_like(lp, dtype=torch.bool)
    exact = gradient(kl.exact_kl(lp.sum(-1), ref.sum(-1)), z)
    assert torch.allclose(gradient((weight * kl.sequence_k2(lp, ref, mask)).sum(), z), exact)
    for estimator in ("k2", "k3"):
        token = (weight * kl.kl_estimate(lp, ref, mask, estimator=estimator).sum(-1)).sum()
        assert (gradient(token, z) - exact).norm() > 0.05, estimator


def test_sequence_k2_joins_the_rows_of_a_trajectory() -> None:
    lp, mask = padded([[-1.0, -2.0], [-0.5]])
    ref = lp - 0.5
    assert kl.sequence_k2(lp, ref, mask).tolist() == pytest.approx([0.5, 0.125])
    joined = kl.sequence_k2(lp, ref, mask, trajectory_index=idx(4, 4))
    assert joined.tolist() == pytest.approx([1.125, 1.125])


def test_exact_values_with_impossible_outcomes() -> None:
    p, q = f64(1.0, 0.0).log(), f64(0.5, 0.5).log()
    assert kl.exact_kl(p, q).item() == pytest.approx(0.693147, abs=1e-6)
    assert kl.exact_entropy(p).item() == 0.0
    assert kl.exact_kl(q, p).item() == float("inf")


def test_adaptive_coefficient_is_bounded_both_ways() -> None:
    step = {"target": 6.0, "samples": 100, "horizon": 1000}
    assert kl.adaptive_kl_coefficient(1.0, kl=60.0, **step) == pytest.approx(1.02)
    assert kl.adaptive_kl_coefficient(1.0, kl=0.0, **step) == pytest.approx(0.98)
    assert kl.adaptive_kl_coefficient(1.0, kl=6.6, **step) == pytest.approx(1.01)


def test_adaptive_entropy_acts_only_below_its_target() -> None:
    assert kl.adaptive_entropy_coefficient(0.01, entropy=0.1, target=0.2) == pytest.approx((0.015, 0.015))
    assert kl.adaptive_entropy_coefficient(0.01, entropy=0.3, target=0.2) == pytest.approx((0.005, 0.0))
    assert kl.adaptive_entropy_coefficient(0.001, entropy=0.3, target=0.2) == pytest.approx((0.0, 0.0))


def test_high_entropy_tokens() -> None:
    entropy, mask = f64([[0.1, 0.9, 0.5, 0.7, 9.0]]), flags(1, 1, 1, 1, 0).unsqueeze(0)
    kept = kl.high_entropy_mask(entropy, mask, share=0.5)
    assert kept[0].tolist() == [False, True, False, True, False]
    assert int(kl.high_entropy_mask(entropy, mask, share=0.01).sum()) == 1
    assert not kl.high_entropy_mask(entropy, mask & False).any()


@quick
@given(p=triples, q=triples, beta=st.floats(0.01, 0.99))
def test_generalised_js_is_a_divergence_and_zero_only_at_equality(
    p: list[float], q: list[float], beta: float
) -> None:
    teacher, student = logp(p), logp(q)
    value = generalised_js(student, teacher, beta=beta)
    assert value >= -1e-12
    assert generalised_js(teacher, teacher, beta=beta).abs() < 1e-12
    # JS_β(P, Q) with the roles exchanged is JS_{1−β}(Q, P)
    assert torch.allclose(value, generalised_js(teacher, student, beta=1 - beta), atol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_generalised_js_gradient_goes_to_the_student_only(beta: float) -> None:
    student, teacher = f64([[0.1, 0.7, -0.3]]).requires_grad_(), f64([[0.4, -0.2, 0.5]]).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: generalised_js(
            torch.log_softmax(s, -1), torch.log_softmax(teacher.detach(), -1), beta=beta
        ),
        (student,),
    )
    value = generalised_js(torch.log_softmax(student, -1), torch.log_softmax(teacher, -1), beta=beta)
    value.sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
