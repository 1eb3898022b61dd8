"""AdamW on fp32 masters, worked by hand; state that comes back bit for bit; schedules."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stepladder.errors import CheckpointError, ConfigError, InvariantError
from stepladder.objectives.rounding import spread
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant, warmup_then_linear
from stepladder.policies.tensors import load_tensors, save_tensors


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_the_first_step_by_hand() -> None:
    """g = (3, 4), norm 5, clipped to norm 1: (.6, .8). Adam's first step is lr * g/|g|: both move by lr.

    m = (1 - .9) g = (.06, .08); v = (1 - .99) g^2 = (.0036, .0064).
    """
    w = parameter(1.0, -1.0)
    optimizer = MasterOptimizer({"w": w}, max_grad_norm=1.0)
    (w * torch.tensor([3.0, 4.0])).sum().backward()
    assert optimizer.step(0.1) == pytest.approx(5.0)
    torch.testing.assert_close(w.detach(), torch.tensor([0.9, -1.1]), rtol=0, atol=1e-6)
    state = optimizer.tensors()
    torch.testing.assert_close(state["exp_avg/w"], torch.tensor([0.06, 0.08]), rtol=1e-5, atol=0)
    torch.testing.assert_close(state["exp_avg_sq/w"], torch.tensor([0.0036, 0.0064]), rtol=1e-5, atol=0)
    assert w.grad is None


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    w = parameter(1.0)
    optimizer = MasterOptimizer({"w": w}, max_grad_norm=1.0)
    (w * 0.25).sum().backward()
    assert optimizer.step(0.1) == pytest.approx(0.25)
    assert float(optimizer.tensors()["exp_avg/w"]) == pytest.approx(0.025)


@pytest.mark.parametrize(("dtype", "spacing"), [(torch.bfloat16, 2.0**-13), (torch.float16, 2.0**-16)])
def test_small_steps_move_a_share_of_the_weights(dtype: torch.dtype, spacing: float) -> None:
    """Fault 63. From 1/64 to 1/32 the spacing of bf16 is 2^-6 · 2^-7 = 2^-13 = 1.2e-4, so that .02 - 1e-6
    rounds back. Of 10,000 weights of .02 as many move in n steps of 1e-6 as n · 1e-6 is of the spacing, by a
    whole spacing each: their mean moves as in float32 from the first step on. A share of p has a standard
    error of √(p(1 − p)/10000), at most .005; the bounds are four of them. (fp16: 2^-6 · 2^-10.)"""
    w = nn.Parameter(torch.full((10_000,), 0.02, dtype=dtype))
    start = w.detach().clone()
    optimizer = MasterOptimizer({"w": w})
    masters = optimizer.masters["w"].detach().clone()
    for n in range(1, 13):
        w.sum().backward()
        optimizer.step(1e-6)
        moved = (start - w.detach().float()) / spacing
        assert float(moved.mean()) == pytest.approx(n * 1e-6 / spacing, abs=0.02)
        assert set(moved.tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(
        masters - optimizer.masters["w"], torch.full((10_000,), 12e-6), rtol=1e-3, atol=0
    )


@given(
    bits=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_spread_masters_round_to_their_weights(bits: list[int], dtype: torch.dtype) -> None:
    """Any weight at all: subnormal, the largest, at a power of two, ±0, ±inf, nan."""
    weights = torch.tensor(bits, dtype=torch.int16).view(dtype)
    masters = spread(weights.float(), dtype)
    assert torch.equal(
        masters.to(dtype).view(torch.int16)[~weights.isnan()], weights.view(torch.int16)[~weights.isnan()]
    )
    assert torch.equal(masters.isnan(), weights.isnan())
    assert torch.equal(masters[weights == 0], weights[weights == 0].float())


def test_masters_are_spread_over_all_that_rounds_to_a_weight_and_always_alike() -> None:
    """Half a spacing of bf16 at 1 is 2^-8 above, and 2^-9 below, where the numbers lie closer."""
    masters = spread(torch.ones(20_000), torch.bfloat16)
    assert torch.equal(masters, spread(torch.ones(20_000), torch.bfloat16))
    assert 0.99 * 2**-8 < float(masters.max()) - 1 < 2**-8
    assert 0.99 * 2**-9 < 1 - float(masters.min()) < 2**-9
    assert float((masters > 1).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert torch.equal(spread(torch.ones(3), torch.float32), torch.ones(3))
    other = spread(torch.ones(20_000), torch.bfloat16, "another layer")
    assert float(torch.corrcoef(torch.stack([masters, other]))[0, 1]) == pytest.approx(0.0, abs=0.03)


def test_optimisers_that_follow_each_other_move_other_weights() -> None:
    """Each rung, and each round of rejection sampling, has its own. Ten times one step of 1e-4 from .3, where
    the spacing is 2^-9: a weight moves in one of them with p = .0512. Independent draws leave
    (1 - p)^10 = .591 of the weights where they were; one draw for all would leave .95. And the mean
    moves by ten steps either way: standard error .0005/√10000·√10."""
    w = nn.Parameter(torch.full((10_000,), 0.3, dtype=torch.bfloat16))
    start = w.detach().clone()
    for _ in range(10):
        optimizer = MasterOptimizer({"w": w})
        w.sum().backward()
        optimizer.step(1e-4)
        optimizer.close()
    assert float((w.detach() == start).float().mean()) == pytest.approx(0.591, abs=0.03)
    assert float((start.float() - w.detach().float()).mean()) == pytest.approx(1e-3, rel=0.1)


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    """1 + 4 * 2^-9: each addend is lost in bf16 (spacing 2^-7 at 1), their sum is not."""
    w = parameter(1.0, dtype=torch.bfloat16)
    optimizer = MasterOptimizer({"w": w}, max_grad_norm=100.0)
    for factor in (1.0, *[2.0**-9] * 4):
        (w * factor).sum().backward()
        assert w.grad is None  # the half-sized gradient is gone at once
    assert optimizer.step(0.0) == 1 + 4 * 2**-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    w, u = parameter(1.0, 2.0, dtype=dtype), parameter(3.0, dtype=dtype)
    optimizer = MasterOptimizer({"w": w, "u": u})
    (w.sum() + u.sum()).backward()
    optimizer.step(0.1)
    before = {k: v.clone() for k, v in optimizer.tensors().items()}
    values = w.detach().clone(), u.detach().clone()
    (w.sum() * bad + u.sum()).backward()
    with pytest.raises(InvariantError, match="The weights were not touched"):
        optimizer.step(0.1)
    assert torch.equal(w.detach(), values[0])
    assert torch.equal(u.detach(), values[1])
    after = optimizer.tensors()
    assert all(torch.equal(after[k], before[k]) for k in before)
    (w.sum() + u.sum()).backward()
    assert math.isfinite(optimizer.step(0.1))  # the bad gradient does not linger


def _model(dtype: torch.dtype, seed: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in (("a", (4, 3)), ("b", (3,)), ("late", (2,)))
    }


def _train(parameters: dict[str, nn.Parameter], optimizer: MasterOptimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(parameters["a"].dtype)
        loss = ((x @ parameters["a"] + parameters["b"]) ** 2).mean()
        if step >= 2:  # no gradient before: its bias correction counts from here
            loss = loss + (parameters["late"] ** 2).sum()
        loss.backward()
        optimizer.step(1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_restored_optimiser_goes_on_bit_for_bit(tmp_path, dtype: torch.dtype, cut: int) -> None:  # type: ignore[no-untyped-def]
    quiet, first, second = _model(dtype, 0), _model(dtype, 0), _model(dtype, 99)
    whole = MasterOptimizer(quiet)
    _train(quiet, whole, range(7))
    half = MasterOptimizer(first)
    _train(first, half, range(cut))
    save_tensors(tmp_path / "state.safetensors", half.tensors())
    rest = MasterOptimizer(second)
    rest.load(load_tensors(tmp_path / "state.safetensors"))
    _train(second, rest, range(cut, 7))
    for name in quiet:
        assert torch.equal(quiet[name], second[name])
    wanted, got = whole.tensors(), rest.tensors()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[k], got[k]) for k in wanted)


def test_a_state_of_another_model_is_refused() -> None:
    state = MasterOptimizer({"w": parameter(1.0, 2.0)}).tensors()
    with pytest.raises(CheckpointError, match=r"holds nothing for 'v'"):
        MasterOptimizer({"v": parameter(1.0)}).load(state)
    with pytest.raises(CheckpointError, match=r"shape \(2,\) for 'w', the model needs \(1,\)"):
        MasterOptimizer({"w": parameter(1.0)}).load(state)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        MasterOptimizer({})


def test_a_closed_optimiser_lets_go_of_the_model() -> None:
    w = parameter(1.0, dtype=torch.bfloat16)
    old = MasterOptimizer({"w": w})
    old.close()
    new = MasterOptimizer({"w": w}, max_grad_norm=100.0)
    w.sum().backward()
    assert old.masters["w"].grad is None
    assert new.step(0.1) == 1.0


def test_warm_up_by_hand() -> None:
    rates = [warmup_then_constant(step, peak=0.3, warmup=3) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert warmup_then_constant(0, peak=0.3, warmup=0) == 0.3


def test_linear_decay_by_hand() -> None:
    rates = [warmup_then_linear(step, peak=0.3, warmup=3, total=6) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1, 0.0])


@given(warmup=st.integers(0, 30), rest=st.integers(1, 30), peak=st.floats(1e-7, 1.0))
def test_the_last_step_has_rate_zero_exactly(warmup: int, rest: int, peak: float) -> None:
    """Fault 114: the schedule counts optimiser steps, reaches its peak, and ends at 0 on the last one."""
    total = max(1, warmup) + rest
    rates = [warmup_then_linear(step, peak=peak, warmup=warmup, total=total) for step in range(total)]
    assert rates[-1] == 0.0
    top = max(warmup - 1, 0)
    assert rates[top] == pytest.approx(peak)
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a > b for a, b in pairwise(rates[top:]))


def test_a_warm_up_without_room_for_the_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match="try warmup=1"):
        warmup_then_linear(0, peak=1.0, warmup=10, total=10)
