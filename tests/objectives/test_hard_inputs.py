"""Inputs at the edge that have a right answer: impossible outcomes, far drift, large counts, empty rows."""

import pytest
import torch
from maths_helpers import f64, flags, gradient, idx

from stepladder.objectives import (
    advantages,
    credit,
    distillation,
    domains,
    estimators,
    kl,
    kto,
    mirror,
    preference,
    supervised,
)
from stepladder.objectives.corrections import mismatch_metrics
from stepladder.objectives.logprobs import full_logprobs
from stepladder.objectives.reduce import merge_metrics

INF = float("inf")


def test_beyond_its_clamp_k3_never_pulls_away_from_the_reference() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    lp = f64([[-901.0, -26.0, -20.5, 29.0]]).requires_grad_()
    values = kl.kl_estimate(lp, torch.full_like(lp, -1.0).detach(), mask)
    assert (values >= 0).all()
    assert values[0, 0] >= values[0, 1] >= values[0, 2]
    slope = gradient(values, lp)[0]
    # where π is far below ref a step down the gradient must not lower it further; far above, k3 is d − 1
    assert (slope[:3] <= 0).all()
    assert slope[3].item() == pytest.approx(1.0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_impossible_for_both_leave_the_divergence_and_its_gradient_alone(beta: float) -> None:
    teacher = torch.log_softmax(f64([[1.0, 0.0]]), -1)
    short = f64([[0.2, 0.9]]).requires_grad_()
    expected = distillation.generalised_js(torch.log_softmax(short, -1), teacher, beta=beta)
    long = f64([[0.2, 0.9, -INF]]).requires_grad_()
    wide = torch.cat([teacher, f64([[-INF]])], dim=1)
    value = distillation.generalised_js(torch.log_softmax(long, -1), wide, beta=beta)
    assert torch.allclose(value, expected)
    assert torch.allclose(gradient(value, long)[:, :2], gradient(expected, short))
    assert gradient(value, long)[0, 2].item() == 0.0


def test_entropy_of_logits_with_a_forbidden_token() -> None:
    z = f64([[0.3, 1.0, -INF]]).requires_grad_()
    chosen, entropy = full_logprobs(z, idx(1))
    allowed = f64([[0.3, 1.0]]).requires_grad_()
    expected, expected_entropy = full_logprobs(allowed, idx(1))
    assert torch.allclose(chosen, expected)
    assert torch.allclose(entropy, expected_entropy)
    assert torch.allclose(gradient(entropy, z)[:, :2], gradient(expected_entropy, allowed))


def test_kto_keeps_float64() -> None:
    # λ = .7 is not a float32 number: .7·(1 − σ(0)) = .35
    losses, _ = kto.kto(
        f64(0.0, 0.0), flags(1, 0), f64([0.0])[0], desirable_weight=0.7, undesirable_weight=0.1
    )
    assert losses.tolist() == pytest.approx([0.35, 0.05], abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_pairs_are_float32(dtype: torch.dtype) -> None:
    w, v = torch.tensor([1.25, -2.0], dtype=dtype), torch.tensor([0.5, 0.75], dtype=dtype)
    lengths, zero = idx(2, 4), torch.zeros(())
    losses = {
        "dpo": preference.dpo(w, v)[0],
        "robust": preference.robust_dpo(w, v)[0],
        "hinge": preference.hinge_dpo(w, v)[0],
        "ipo": preference.ipo(w, v, lengths, lengths)[0],
        "ipo_sum": preference.ipo(w, v, lengths, lengths, average=False)[0],
        "dpo_norm": preference.length_normalised_dpo(w, v, lengths, lengths)[0],
        "simpo": preference.simpo(w, v, lengths, lengths, gamma=1.0)[0],
        "orpo": preference.orpo(-w.abs(), -v.abs(), lengths, lengths)[0],
        "kto": kto.kto(w, flags(1, 0), zero)[0],
    }
    assert {name: x.dtype for name, x in losses.items()} == dict.fromkeys(losses, torch.float32)
    assert torch.equal(losses["dpo"], preference.dpo(w.float(), v.float())[0])


def test_a_task_whose_trained_tokens_agree_has_no_spread_whatever_untrained_rows_hold() -> None:
    # 3·.1 + 7·.1 + 11·.1 is not 21·.1 in binary: the deviation is 1e-17, not 0
    a = f64(0.1, 0.1, 0.1, 0.0)
    for counts in (idx(3, 7, 11, 0), idx(3, 0, 0, 0), idx(1999, 23, 7, 0), idx(0, 0, 0, 0)):
        got = domains.task_normalised_advantages(a, counts, idx(0, 0, 0, 0))
        assert got.tolist() == [0.0] * 4, counts


def test_without_a_baseline_a_deviation_of_zero_gives_zero_not_a_million() -> None:
    for scale in ("group_std", "batch_std"):
        a = advantages.group_advantages(f64(1.0, 1.0), idx(0, 0), baseline="none", scale=scale)
        assert a.tolist() == [0.0, 0.0]


def test_large_counts() -> None:
    scores = torch.arange(3000, dtype=torch.float64)
    # E[max of k of 0..n−1] = k(n+1)/(k+1) − 1
    assert estimators.max_at_k(scores, 1500) == pytest.approx(1500 * 3001 / 1501 - 1)
    assert estimators.majority_success(0.5, 2001) == pytest.approx(0.5)
    assert estimators.majority_success(0.55, 2001) == pytest.approx(0.999996, abs=5e-6)
    assert estimators.majority_success(0.0, 2001) == 0.0
    assert estimators.majority_success(1.0, 2001) == 1.0


def test_no_columns_no_reward() -> None:
    empty = torch.zeros(2, 0, dtype=torch.float64)
    assert credit.kl_penalised_rewards(f64(1.0, 2.0), empty, empty > 0, coefficient=0.1).shape == (2, 0)


def test_the_mirror_surrogate_does_not_differentiate_rewards() -> None:
    lp, mask = f64([[-1.0]]).requires_grad_(), torch.ones(1, 1, dtype=torch.bool)
    r = f64(1.0).requires_grad_()
    loss = mirror.squared_surrogate(lp, lp.detach(), r, f64(0.5), mask, tau=0.5).sum()
    assert torch.autograd.grad(loss, r, allow_unused=True)[0] is None


def test_metrics_that_are_no_means_do_not_depend_on_how_the_step_was_cut() -> None:
    lp, old = f64([[-1.0], [-3.0], [-0.5]]), f64([[-1.4], [-2.5], [-0.7]])
    mask = torch.ones(3, 1, dtype=torch.bool)
    for measure in (
        lambda rows: supervised.cross_entropy(lp[rows], mask[rows])[1],
        lambda rows: mismatch_metrics(lp[rows], old[rows], mask[rows]),
    ):
        whole = measure(slice(0, 3))
        merged = merge_metrics([measure(slice(0, 1)), measure(slice(1, 3))])
        assert set(merged) == set(whole)
        for name, value in whole.items():
            assert float(merged[name]) == pytest.approx(float(value), abs=1e-12), name


def test_the_discount_between_turns_and_its_trace_are_two_numbers() -> None:
    # Two turns of one token: δ_1 = 1 − .4, A_1 = .6; δ_0 = .9·.4 − .2 = .16, A_0 = .16 + .9·.5·.6 = .43
    a, returns = credit.bilevel_gae(
        f64([[0.0, 1.0]]), f64([[0.2, 0.4]]), idx(0, 1).unsqueeze(0), turn_gamma=0.9, turn_lam=0.5
    )
    assert a[0].tolist() == pytest.approx([0.43, 0.6])
    assert returns[0].tolist() == pytest.approx([0.63, 1.0])
