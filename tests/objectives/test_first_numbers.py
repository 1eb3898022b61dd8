"""The end-to-end case of GRPO and its siblings, by hand.

θ [−1, −.5], old [−1.1, −.5], A = +1: log-ratios .1, 0; r = 1.105171, 1; losses −1.105171, −1.
θ [−.8, −1.2, −.3], old [−.8, −1, −.6], A = −1: log-ratios 0, −.2, .3; r = 1, .818731, 1.349859; losses the same
(for A < 0 a ratio above 1 + ε is not clipped). Sums −2.105171 and 3.168590.
"""

import pytest
import torch
from stepladder.objectives.advantages import group_advantages
from stepladder.objectives.policy_gradient import cispo, clipped_surrogate
from stepladder.objectives.reduce import aggregate, step_denominators, trained_lengths

CURRENT = torch.tensor([[-1.0, -0.5, 0.0], [-0.8, -1.2, -0.3]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -0.5, 9.0], [-0.8, -1.0, -0.6]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])
SIGN = torch.tensor([1.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        ("sequence_mean", None, (-2.105171 / 2 + 3.168590 / 3) / 2),
        ("token_mean", None, (-2.105171 + 3.168590) / 5),
        ("constant", 4.0, (-2.105171 + 3.168590) / 8),
        ("sequence_sum", None, (-2.105171 + 3.168590) / 2),
    ],
)
def test_the_worked_case_under_each_aggregation(mode: str, constant: float | None, expected: float) -> None:
    advantages = group_advantages(SIGN, torch.zeros(2, dtype=torch.long), ddof=0, eps=0.0)
    losses, _ = clipped_surrogate(CURRENT, OLD, advantages, MASK)
    denominators = step_denominators(trained_lengths(MASK), mode=mode, constant=constant)
    assert aggregate(losses, MASK, denominators).item() == pytest.approx(expected, abs=1e-6)


def test_gspo_takes_the_geometric_mean_of_the_trained_tokens() -> None:
    # s = exp(.1/2), exp(.1/3); A = +1 is clipped at 1.0004, A = −1 is not: (−1.0004 + 1.033895)/2
    losses, _ = clipped_surrogate(
        CURRENT, OLD, SIGN, MASK, ratio_level="sequence", clip_low=3e-4, clip_high=4e-4
    )
    denominators = step_denominators(trained_lengths(MASK), mode="sequence_mean")
    assert aggregate(losses, MASK, denominators).item() == pytest.approx(0.0167476, abs=1e-6)


def test_cispo_weights_by_the_capped_ratio() -> None:
    # (1.105171·1 + 1·.5 − 1·.8 − .818731·1.2 − 1.28·.3) / 5
    losses, _ = cispo(CURRENT, OLD, SIGN, MASK)
    denominators = step_denominators(trained_lengths(MASK), mode="token_mean")
    assert aggregate(losses, MASK, denominators).item() == pytest.approx(-0.1122612, abs=1e-6)


def test_equal_rewards_give_exactly_zero() -> None:
    # in float32 these twelve have a standard deviation of 1e-7 and an unguarded advantage of .886
    advantages = group_advantages(torch.full((12,), 1.15), torch.zeros(12, dtype=torch.long), eps=1e-8)
    assert torch.equal(advantages, torch.zeros(12))
