"""Importance weights: detached, identity where the models agree, products over the whole trajectory."""

import math

import pytest
import torch
from maths_batches import make
from maths_helpers import f64, flags, idx

from stepladder.objectives import corrections
from stepladder.objectives.critic import value_loss

KINDS = ("none", "token_cap", "token_mask", "sequence_cap", "sequence_mask", "geometric_mask")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_weight_one(kind: str) -> None:
    b = make(0, 2, 2, 4)
    weights, metrics = corrections.correction_weights(
        b.lp, b.lp, b.mask, correction=kind, low=0.999, high=1.001
    )
    assert torch.equal(weights, b.mask.double())
    assert metrics["correction_touched"].item() == 0.0
    assert metrics["correction_weight"].item() == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_weights_carry_no_gradient(kind: str) -> None:
    b = make(1, 1, 2, 4)
    lp = b.lp.clone().requires_grad_()
    weights, metrics = corrections.correction_weights(lp, b.behaviour, b.mask, correction=kind, low=0.1)
    assert not weights.requires_grad
    assert not any(value.requires_grad for value in metrics.values())


def test_sequence_weights_see_all_rows_of_a_trajectory() -> None:
    lp, zero = f64([[0.1, 0.2], [0.3, 5.0]]), torch.zeros(2, 2, dtype=torch.float64)
    mask = torch.stack([flags(1, 1), flags(1, 0)])
    together, _ = corrections.correction_weights(
        lp, zero, mask, correction="sequence_cap", high=9.0, trajectory_index=idx(4, 4)
    )
    assert together[mask].tolist() == pytest.approx([math.exp(0.6)] * 3)
    apart, _ = corrections.correction_weights(lp, zero, mask, correction="sequence_cap", high=9.0)
    assert apart[mask].tolist() == pytest.approx([math.exp(0.3)] * 3)
    kept = corrections.off_policy_sequence_mask(
        -lp, zero, f64(-1.0, -1.0), mask, threshold=0.19, trajectory_index=idx(4, 4)
    )
    assert kept.tolist() == [False, False]  # mean .2 over the three tokens


def test_lower_bounds_are_off_unless_given() -> None:
    lp, zero, mask = f64([[-3.0]]), f64([[0.0]]), torch.ones(1, 1, dtype=torch.bool)
    for kind in ("token_mask", "sequence_mask", "geometric_mask"):
        weights, _ = corrections.correction_weights(lp, zero, mask, correction=kind)
        assert weights.item() == pytest.approx(math.exp(-3))
        weights, metrics = corrections.correction_weights(lp, zero, mask, correction=kind, low=0.5)
        assert weights.item() == 0.0
        assert metrics["correction_touched"].item() == 1.0


def test_mismatch_of_equal_models() -> None:
    b = make(2, 1, 2, 4)
    metrics = corrections.mismatch_metrics(b.lp, b.lp, b.mask)
    assert metrics["mismatch_k1"].item() == metrics["mismatch_k3"].item() == metrics["chi2"].item() == 0.0
    assert metrics["ess"].item() == pytest.approx(1.0)
    assert metrics["ppl_ratio"].item() == 1.0
    drifted = corrections.mismatch_metrics(b.lp, b.behaviour, b.mask)
    gap = (b.lp - b.behaviour)[b.mask].abs().max().item()
    assert drifted["mismatch_max"].item() == pytest.approx(gap)
    assert drifted["mismatch_k3"].item() > 0


def test_value_metrics() -> None:
    v, old, target = f64([[1.0, 0.0]]), f64([[0.5, 1.0]]), f64([[1.0, 2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, metrics = value_loss(v, old, target, mask, clip=0.2)
    # first: clipped to .7, (.7−1)² > 0; second: 0 is clipped to .8, (.8−2)² < 4
    assert losses[0].tolist() == pytest.approx([0.045, 2.0])
    assert metrics["value_clip"].item() == 0.5
    # returns 1 and 2: variance .25; residual ((.5)² + 1)/2 = .625
    assert metrics["explained_variance"].item() == pytest.approx(1 - 0.625 / 0.25)
    assert metrics["value_mean"].item() == 0.5
    assert metrics["return_mean"].item() == 1.5
