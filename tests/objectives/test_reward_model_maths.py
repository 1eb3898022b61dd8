"""Reward models: rankings, step labels, scores of solutions, calibration."""

import math

import pytest
import torch
from maths_helpers import f64, flags, gradient, step_loss

from stepladder.objectives import reward_model, supervised


def test_ranked_answers_are_the_mean_over_pairs() -> None:
    scores = f64(2.0, 1.0, -0.5)
    pairs = [(2.0, 1.0), (2.0, -0.5), (1.0, -0.5)]
    expected = sum(math.log1p(math.exp(-(a - b))) for a, b in pairs) / 3
    assert reward_model.bradley_terry_ranked(scores).item() == pytest.approx(expected)


def test_margin_may_differ_per_pair() -> None:
    losses, _ = reward_model.bradley_terry(f64(1.0, 1.0), f64(0.0, 0.0), margin=f64(1.0, 0.0))
    assert losses.tolist() == pytest.approx([math.log(2), math.log1p(math.exp(-1))])
    assert reward_model.preference_probability(f64(1.0), f64(0.0), margin=1.0).item() == 0.5


def test_metrics_of_pairs() -> None:
    _, metrics = reward_model.bradley_terry(f64(1.0, 0.0, 2.0), f64(0.0, 0.0, 3.0))
    assert metrics["accuracy"].item() == pytest.approx(1 / 3)  # the tie is no win
    assert metrics["margin"].item() == pytest.approx(0.0)
    assert metrics["score_mean"].item() == pytest.approx(1.0)
    assert metrics["pairs"].item() == 3


@pytest.mark.parametrize(
    ("ratings", "labels", "supervised_steps"),
    [
        ([1, 0, 1], [1.0, 1.0, 1.0], [True, True, True]),
        ([1, -1, 1, -1], [1.0, 0.0, 1.0, 0.0], [True, True, False, False]),
        ([-1], [0.0], [True]),
        ([], [], []),
    ],
)
def test_prm800k_rule(ratings: list[int], labels: list[float], supervised_steps: list[bool]) -> None:
    assert reward_model.prm800k_labels(ratings) == (labels, supervised_steps)


def test_math_shepherd_rule() -> None:
    assert reward_model.math_shepherd_label([False, False]) == 0.0
    assert reward_model.math_shepherd_label([False, True]) == 1.0
    assert reward_model.math_shepherd_label([False, True], soft=True) == 0.5


def test_solution_scores_ignore_masked_steps_and_survive_many() -> None:
    logp = torch.full((1, 2000), 0.5, dtype=torch.float64).log()
    mask = torch.ones(1, 2000, dtype=torch.bool)
    assert reward_model.solution_score(logp, mask, aggregation="min").item() == pytest.approx(0.5)
    assert reward_model.solution_score(logp, mask, aggregation="product").item() == 0.0  # underflow, not NaN
    steps, some = f64([[0.9, 0.1, 0.8, 0.2]]).log(), flags(1, 0, 1, 0).unsqueeze(0)
    scores = {
        how: reward_model.solution_score(steps, some, aggregation=how).item()
        for how in ("product", "min", "last", "mean")
    }
    assert scores == pytest.approx({"product": 0.72, "min": 0.8, "last": 0.8, "mean": 0.85})


def test_step_metrics() -> None:
    logits, labels = f64([[2.0, -1.0, 3.0]]), f64([[1.0, 1.0, 0.0]])
    _, metrics = reward_model.step_cross_entropy(logits, labels, flags(1, 1, 0).unsqueeze(0))
    assert metrics["accuracy"].item() == 0.5
    assert metrics["tokens"].item() == 2


def test_soft_labels_have_their_minimum_at_the_label() -> None:
    z = torch.logit(f64([[0.25]])).requires_grad_()
    losses, _ = reward_model.step_cross_entropy(z, f64([[0.25]]), torch.ones(1, 1) > 0)
    assert gradient(losses, z).abs().max() < 1e-12


def test_verifier_probability_is_a_softmax_of_two() -> None:
    assert reward_model.verifier_probability(f64(2.0), f64(1.0)).item() == pytest.approx(
        math.exp(2) / (math.exp(2) + math.exp(1))
    )


def test_calibration_error_by_hand() -> None:
    # bins of .5: (.2, wrong), (.4, right): |.3 − .5|·2 = .4; (.9, right): .1; sum .5 over 3
    error = reward_model.calibration_error(f64(0.2, 0.4, 0.9), flags(0, 1, 1), bins=2)
    assert error.item() == pytest.approx(0.5 / 3)
    assert reward_model.calibration_error(f64(1.0, 0.0), flags(1, 0)).item() == 0.0


def test_dft_weighs_by_the_detached_probability() -> None:
    lp = f64([[-1.0, -2.0]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, metrics = supervised.cross_entropy(lp, mask, reweight=True)
    assert losses[0].tolist() == pytest.approx([math.exp(-1), 2 * math.exp(-2)])
    assert gradient(losses, lp)[0].tolist() == pytest.approx([-math.exp(-1), -math.exp(-2)])
    assert metrics["nll"].item() == 1.5
    assert metrics["perplexity"].item() == pytest.approx(math.exp(1.5))


def test_packing_equals_padding() -> None:
    """Two documents of 3 and 2 tokens in one row and in two: the same loss to 1e-6."""
    docs = [f64([-0.5, -1.0]), f64([-2.0])]
    packed, mask = f64([[-0.5, -1.0, -9.0, -2.0]]), flags(1, 1, 0, 1).unsqueeze(0)
    together = step_loss(supervised.cross_entropy(packed, mask)[0], mask, "token_mean")
    padded = torch.stack([docs[0], torch.cat([docs[1], f64(-7.0)])])
    pad_mask = torch.stack([flags(1, 1), flags(1, 0)])
    apart = step_loss(supervised.cross_entropy(padded, pad_mask)[0], pad_mask, "token_mean")
    assert together.item() == pytest.approx(apart.item(), abs=1e-6)


def test_accuracy_of_steps_is_judged_at_one_half() -> None:
    # σ(.3) > ½ is a right step, σ(−.3) a wrong one; two of three agree with their labels
    logits, labels = f64([[0.3, -0.3, 0.3]]), f64([[1.0, 0.0, 0.0]])
    _, metrics = reward_model.step_cross_entropy(logits, labels, torch.ones(1, 3, dtype=torch.bool))
    assert metrics["accuracy"].item() == pytest.approx(2 / 3)
