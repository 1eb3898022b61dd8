"""Bad input gives a clear error or the documented value, never NaN."""

import os
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_bad_inputs import CASES, LP, MASK
from maths_batches import make
from maths_helpers import f64, gradient, idx
from test_invariants import AGGREGATIONS, OBJECTIVES

from stepladder.objectives import (
    advantages,
    corrections,
    credit,
    critic,
    domains,
    kl,
    policy_gradient,
    supervised,
)
from stepladder.objectives.reduce import Aggregation, aggregate, step_denominators, trained_lengths

HERE = Path(__file__).parent


def test_without_shape_checks_every_bad_input_is_a_clear_error() -> None:
    root = HERE.parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{HERE}"}
    script = [sys.executable, str(HERE / "maths_bad_inputs.py")]
    done = subprocess.run(script, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(CASES))
def test_with_shape_checks_it_is_refused_too(name: str) -> None:
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)):
        CASES[name][0]()


def test_the_shape_checks_are_on_in_these_tests() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        supervised.cross_entropy(LP.long(), MASK)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_all_masked_batch_is_zero_with_zero_gradient(name: str, mode: Aggregation) -> None:
    b = make(0, 1, 2, 3)
    b.mask[:] = False
    b = b.poisoned(float("nan"))
    lp = b.lp.clone().requires_grad_()
    losses = OBJECTIVES[name](lp, b, f64(1.0, -1.0))
    d = step_denominators(trained_lengths(b.mask), mode=mode, constant=3, group_index=b.group)
    loss = aggregate(losses, b.mask, d)
    assert loss.item() == 0.0
    assert torch.equal(gradient(loss, lp), torch.zeros_like(lp))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, float("nan"), 0.1, -3.0]), min_size=2, max_size=6),
    baseline=st.sampled_from(["mean", "leave_one_out", "none"]),
    scale=st.sampled_from(["group_std", "batch_std", "none"]),
    eps=st.sampled_from([0.0, 1e-6]),
    ddof=st.sampled_from([0, 1]),
)
def test_unscorable_members_never_make_nan(
    rewards: list[float], baseline: str, scale: str, eps: float, ddof: int
) -> None:
    r, group = f64(*rewards), idx(*[0] * len(rewards))
    options = {"baseline": baseline, "scale": scale, "eps": eps, "ddof": ddof}
    a = advantages.group_advantages(r, group, **options)
    assert torch.isfinite(a).all()
    assert torch.equal(a[torch.isnan(r)], torch.zeros_like(a[torch.isnan(r)]))
    # the others get what they would get without the unscorable one
    kept = r[~torch.isnan(r)]
    if len(kept) > 1:
        alone = advantages.group_advantages(kept, group[: len(kept)], **options)
        assert torch.allclose(a[~torch.isnan(r)], alone)


def test_one_scorable_member_left_gives_no_signal() -> None:
    r = f64(1.0, float("nan"), float("nan"))
    assert advantages.group_advantages(r, idx(0, 0, 0)).tolist() == [0.0, 0.0, 0.0]
    assert advantages.constant_advantages(r, baseline=0.25).tolist() == [0.75, 0.0, 0.0]
    assert domains.domain_zscores(r, idx(0, 0, 0)).tolist() == [0.0, 0.0, 0.0]


def test_an_unscorable_row_gets_no_token_reward() -> None:
    rewards = credit.kl_penalised_rewards(
        f64(float("nan"), 1.0), f64([[0.1, 0.1], [0.1, 0.1]]), torch.ones(2, 2) > 0, coefficient=0.5
    )
    assert rewards.tolist() == [[0.0, 0.0], [-0.05, pytest.approx(0.95)]]


def test_empty_batches_and_widths_are_zero() -> None:
    empty, mask = torch.zeros(2, 0, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.bool)
    losses, metrics = policy_gradient.clipped_surrogate(empty, empty, f64(1.0, 1.0), mask)
    assert losses.shape == (2, 0)
    assert metrics["tokens"].item() == 0
    assert credit.gae(empty, empty, mask)[0].shape == (2, 0)
    assert kl.kl_estimate(empty, empty, mask).shape == (2, 0)
    assert torch.isfinite(corrections.mismatch_metrics(empty, empty, mask)["ess"])
    assert critic.value_loss(empty, empty, empty, mask)[1]["explained_variance"].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_and_float64_is_kept(dtype: torch.dtype) -> None:
    lp, mask = torch.full((1, 4096), -1.0, dtype=dtype), torch.ones(1, 4096, dtype=torch.bool)
    losses, _ = supervised.cross_entropy(lp, mask)
    loss = aggregate(losses, mask, step_denominators(trained_lengths(mask), mode="sequence_sum"))
    assert loss.dtype == torch.float32
    assert loss.item() == 4096.0  # half precision would stick at 256 or 2048
    double, _ = supervised.cross_entropy(lp.double(), mask)
    assert double.dtype == torch.float64


def test_extreme_drift_stays_finite() -> None:
    lp = f64([[-1e4, -1e-9]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for name in ("clip", "cispo"):
        losses, metrics = policy_gradient.SURROGATES[name](lp, f64([[-1e-9, -1e4]]), f64(-1.0), mask)
        assert torch.isfinite(losses).all()
        assert torch.isfinite(gradient(losses, lp)).all()
        assert all(torch.isfinite(value) for value in metrics.values())
    assert torch.isfinite(kl.kl_estimate(lp, f64([[0.0, -1e4]]), mask)).all()
