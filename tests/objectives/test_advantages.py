"""Group, batch and domain statistics against plain arithmetic, and the guard against float noise."""

import statistics

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from maths_helpers import f64, flags, idx

from stepladder.objectives import advantages, domains

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@quick
@given(
    value=st.floats(-1e3, 1e3, width=32),
    size=st.integers(2, 32),
    eps=st.sampled_from([0.0, 1e-8, 1e-4]),
    ddof=st.sampled_from([0, 1]),
    scale=st.sampled_from(["group_std", "batch_std", "none"]),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
)
def test_equal_rewards_are_exactly_zero_at_every_size(
    value: float, size: int, eps: float, ddof: int, scale: str, baseline: str
) -> None:
    r = torch.full((size,), value)
    a = advantages.group_advantages(
        r, torch.zeros(size, dtype=torch.long), eps=eps, ddof=ddof, scale=scale, baseline=baseline
    )
    assert torch.equal(a, torch.zeros(size))


def test_the_guard_is_relative_above_one_and_absolute_below() -> None:
    group = idx(0, 0)
    assert advantages.group_advantages(f64(1000.0, 1000.0005), group).abs().max() == 0  # 5e-4 ≤ 1e-6·1000
    assert advantages.group_advantages(f64(1000.0, 1000.0020), group).abs().max() > 0.5
    assert advantages.group_advantages(f64(0.0, 5e-7), group).abs().max() == 0
    assert advantages.group_advantages(f64(0.0, 2e-6), group).abs().max() > 0.3


def test_float32_rewards_are_treated_in_float64() -> None:
    # float32 sums of 16777216 + 1 lose the 1
    r = torch.tensor([16777216.0, 16777300.0, 16777216.0, 16777300.0])
    a = advantages.group_advantages(r, idx(0, 0, 0, 0), eps=0.0)
    assert a.dtype == torch.float32
    assert a.tolist() == pytest.approx([-0.8660254, 0.8660254] * 2)


def test_batch_scale_uses_all_rewards_and_group_means() -> None:
    r = f64(1.0, 0.0, 3.0, 1.0)
    std = statistics.stdev([1.0, 0.0, 3.0, 1.0])
    a = advantages.group_advantages(r, idx(0, 0, 1, 1), scale="batch_std", eps=0.0)
    assert a.tolist() == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std])


def test_leave_one_out_by_hand() -> None:
    a = advantages.group_advantages(f64(3.0, 1.0, 2.0), idx(0, 0, 0), baseline="leave_one_out", scale="none")
    assert a.tolist() == pytest.approx([1.5, -1.5, 0.0])
    # an unscorable member leaves the baseline too: 3 − 1, 1 − 3
    a = advantages.group_advantages(
        f64(3.0, 1.0, float("nan")), idx(0, 0, 0), baseline="leave_one_out", scale="none"
    )
    assert a.tolist() == pytest.approx([2.0, -2.0, 0.0])


def test_no_baseline_keeps_equal_rewards() -> None:
    a = advantages.group_advantages(f64(2.0, 2.0), idx(0, 0), baseline="none", scale="none")
    assert a.tolist() == [2.0, 2.0]
    assert advantages.constant_advantages(f64(2.0, 2.0), baseline=0.5).tolist() == [1.5, 1.5]


def test_batch_advantages_are_those_of_one_group() -> None:
    r = f64(1.0, 0.0, 3.0)
    assert torch.equal(
        advantages.batch_advantages(r, eps=0.0), advantages.group_advantages(r, idx(0, 0, 0), eps=0.0)
    )


def test_whitening() -> None:
    values, mask = f64([[1.0, 5.0, 99.0], [3.0, 7.0, 99.0]]), torch.stack([flags(1, 1, 0)] * 2)
    white = advantages.whiten(values, mask, eps=0.0)
    sd = statistics.stdev([1.0, 5.0, 3.0, 7.0])
    assert white[mask].tolist() == pytest.approx([(x - 4) / sd for x in (1.0, 5.0, 3.0, 7.0)])
    assert (white[~mask] == 0).all()
    assert advantages.whiten(values, mask, eps=0.0, shift=False)[mask].mean().item() == pytest.approx(4.0)
    equal = advantages.whiten(torch.full((1, 12), 1.15), torch.ones(1, 12) > 0)
    assert torch.equal(equal, torch.zeros(1, 12))
    assert torch.equal(advantages.whiten(values, mask & False), torch.zeros_like(values))


def test_task_normalisation_weighs_tokens_and_separates_tasks() -> None:
    a = domains.task_normalised_advantages(f64(1.0, -1.0, 5.0, 5.0), idx(3, 1, 2, 2), idx(0, 0, 1, 1))
    # task 0: mean (3 − 1)/4 = .5, variance (3·.25 + 2.25)/4 = .75
    assert a.tolist() == pytest.approx([0.5 / 0.75**0.5, -1.5 / 0.75**0.5, 0.0, 0.0])


def test_erpo_mixes_prompt_means_and_environment_spread() -> None:
    r, group, environment = f64(1.0, 0.0, 10.0, 20.0), idx(0, 0, 1, 1), idx(0, 0, 1, 1)
    a = domains.environment_scaled_advantages(r, group, environment, eps=0.0)
    assert a.tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0])
    one = domains.environment_scaled_advantages(r, group, idx(0, 0, 0, 0), eps=0.0)
    sd = statistics.pstdev([1.0, 0.0, 10.0, 20.0])
    assert one.tolist() == pytest.approx([0.5 / sd, -0.5 / sd, -5 / sd, 5 / sd])


def test_domain_scores_of_a_flat_domain_are_zero() -> None:
    z = domains.domain_zscores(torch.tensor([0.7] * 7 + [1.0, 2.0]), idx(*[0] * 7, 1, 1))
    assert z[:7].tolist() == [0.0] * 7
    assert z[7:].tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@given(rewards=st.lists(st.floats(-5, 5), min_size=6, max_size=6), shift=st.floats(-50, 50))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_every_group_may_be_shifted_by_its_own_constant(
    baseline: str, scale: str, rewards: list[float], shift: float
) -> None:
    r, group = f64(*rewards), idx(4, 1, 1, 4, 4, 1)
    assume(all(float(r[group == g].std()) >= 0.01 for g in (1, 4)))
    if scale == "batch_std":  # the batch's deviation is invariant to one common shift only
        moved = r + shift
    else:
        moved = r + shift * group
    options = {"baseline": baseline, "scale": scale}
    before, after = (advantages.group_advantages(x, group, **options) for x in (r, moved))
    assert torch.allclose(before, after, atol=1e-6)
