"""The matrix for losses of pairs and single answers: one aggregation (the mean over the pairs of the
step)."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths_batches import Batch, make
from maths_helpers import gradient
from torch import Tensor

from stepladder.objectives import kto, preference, reward_model

Sides = tuple[Tensor, Tensor, Tensor, Tensor]
few = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@dataclasses.dataclass(frozen=True)
class Pairs:
    chosen: Batch
    rejected: Batch

    def swapped(self) -> "Pairs":
        return Pairs(self.rejected, self.chosen)

    def map(self, change: Callable[[Batch], Batch]) -> "Pairs":
        return Pairs(change(self.chosen), change(self.rejected))


def make_pairs(seed: int, count: int, width: int) -> Pairs:
    sides = [make(seed + 7919 * i, 1, count, width) for i in (0, 1)]
    for side in sides:
        side.mask[:, 0] = True  # no empty answers
    return Pairs(*sides)


pairs = st.builds(make_pairs, seed=st.integers(0, 2**31), count=st.integers(2, 4), width=st.integers(1, 5))


def sums(lp: Tensor, b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(log-ratio to the reference, log-probability, length) of every answer."""
    total, lengths = preference.sequence_sums(lp, b.mask)
    reference, _ = preference.sequence_sums(b.reference, b.mask)
    return total - reference, total, lengths


def on_ratios(loss: Callable[..., tuple[Tensor, object]], **options: object) -> Callable[..., Tensor]:
    def losses(chosen: Tensor, rejected: Tensor, p: Pairs) -> Tensor:
        return loss(sums(chosen, p.chosen)[0], sums(rejected, p.rejected)[0], **options)[0]

    return losses


def with_lengths(
    loss: Callable[..., tuple[Tensor, object]], *, ratios: bool, **options: object
) -> Callable[..., Tensor]:
    which = 0 if ratios else 1

    def losses(chosen: Tensor, rejected: Tensor, p: Pairs) -> Tensor:
        w, v = sums(chosen, p.chosen), sums(rejected, p.rejected)
        return loss(w[which], v[which], w[2], v[2], **options)[0]

    return losses


def kto_both(chosen: Tensor, rejected: Tensor, p: Pairs) -> Tensor:
    """KTO on the chosen answers as desirable, the rejected as undesirable, two numbers added per pair."""
    z0 = torch.tensor(0.3, dtype=torch.float64)
    up, down = sums(chosen, p.chosen)[0], sums(rejected, p.rejected)[0]
    yes = torch.ones(len(up), dtype=torch.bool)
    return (
        kto.kto(up, yes, z0, undesirable_weight=1.5)[0] + kto.kto(down, ~yes, z0, undesirable_weight=1.5)[0]
    )


def scores(chosen: Tensor, rejected: Tensor, p: Pairs) -> Tensor:
    """Bradley-Terry on the masked sums as if they were scores of a head."""
    return reward_model.bradley_terry(sums(chosen, p.chosen)[1], sums(rejected, p.rejected)[1])[0]


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "dpo": on_ratios(preference.dpo, beta=0.3),
    "cdpo": on_ratios(preference.dpo, beta=0.3, label_smoothing=0.1),
    "robust": on_ratios(preference.robust_dpo, beta=0.3, label_smoothing=0.1),
    "hinge": on_ratios(preference.hinge_dpo, beta=0.3),
    "ipo": with_lengths(preference.ipo, ratios=True),
    "ipo_sum": with_lengths(preference.ipo, ratios=True, average=False),
    "dpo_norm": with_lengths(preference.length_normalised_dpo, ratios=True, beta=0.3),
    "simpo": with_lengths(preference.simpo, ratios=False, gamma=1.0),
    "simpo_0": with_lengths(preference.simpo, ratios=False, gamma=0.0),
    "orpo": with_lengths(preference.orpo, ratios=False),
    "kto": kto_both,
    "bradley_terry": scores,
}
INVARIANTS = ("masked", "padding", "order", "micro_batches", "gradcheck", "swap")
SWAP_FACTOR = {"dpo": 1.0, "cdpo": 1 - 0.2, "robust": 1 / (1 - 0.2), "dpo_norm": 1.0, "simpo_0": 1.0}
NOT_APPLICABLE = {
    ("hinge", "swap"): "not a logistic loss: max(0, 1 − m) − max(0, 1 + m) is not linear",
    ("ipo", "swap"): "a square: the difference is −4·m·target, tested by its golden value",
    ("ipo_sum", "swap"): "a square, as ipo",
    ("simpo", "swap"): "γ > 0 is not antisymmetric; simpo_0 is the case that is",
    ("orpo", "swap"): "the likelihood term is only on the chosen side",
    ("kto", "swap"): "each answer is judged alone, with weights of its own kind",
}
OUT_OF_REACH = {
    "reward_shift": "no reward enters (a shift of Bradley-Terry scores is a known fault, 80)",
    "reward_scale": "no reward enters",
    "on_policy": "no behaviour policy",
    "zero_advantage": "no advantage",
    "split_trajectory": "an answer is one sample",
    "aggregation": "a pair is one number: the mean over the pairs of the step",
}
CELLS = [c for c in itertools.product(OBJECTIVES, INVARIANTS) if c not in NOT_APPLICABLE]


def cells(invariant: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, which in CELLS if which == invariant])


def solve(name: str, p: Pairs, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient for chosen, gradient for rejected log-probabilities)."""
    chosen, rejected = p.chosen.lp.clone().requires_grad_(), p.rejected.lp.clone().requires_grad_()
    losses = OBJECTIVES[name](chosen, rejected, p)
    loss = preference.mean_over_step(losses, len(losses) if count is None else count)
    return loss.detach(), gradient(loss, chosen), gradient(loss, rejected)


def close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e-9, atol=1e-9)


def test_every_cell_runs_or_has_a_reason() -> None:
    assert len(CELLS) + len(NOT_APPLICABLE) == len(OBJECTIVES) * len(INVARIANTS)
    assert all(name in OBJECTIVES and which in INVARIANTS for name, which in NOT_APPLICABLE)
    assert all(OUT_OF_REACH.values())


@cells("masked")
@few
@given(p=pairs, value=st.sampled_from([1e6, float("nan"), float("inf")]))
def test_masked_tokens_change_nothing(name: str, p: Pairs, value: float) -> None:
    results = solve(name, p)
    poisoned = solve(name, p.map(lambda b: b.poisoned(value)))
    assert all(torch.equal(x, y) for x, y in zip(results, poisoned, strict=True))


@cells("padding")
@few
@given(p=pairs, left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_changes_nothing(name: str, p: Pairs, left: int, right: int) -> None:
    loss, slope, _ = solve(name, p)
    wide_loss, wide_slope, _ = solve(name, p.map(lambda b: b.padded(left, right)))
    assert close(wide_loss, loss)
    assert close(wide_slope[:, left : left + slope.shape[1]], slope)


@cells("order")
@few
@given(p=pairs, seed=st.integers(0, 1000))
def test_the_order_of_pairs_changes_nothing(name: str, p: Pairs, seed: int) -> None:
    order = torch.randperm(len(p.chosen.mask), generator=torch.Generator().manual_seed(seed))
    loss, slope, other = solve(name, p)
    loss_, slope_, other_ = solve(name, p.map(lambda b: b.rows(order)))
    assert close(loss_, loss)
    assert close(slope_, slope[order])
    assert close(other_, other[order])


@cells("micro_batches")
@few
@given(p=pairs)
def test_micro_batches_of_every_size_add_up(name: str, p: Pairs) -> None:
    count = len(p.chosen.mask)
    loss, slope, other = solve(name, p)
    for size in range(1, count):
        rows = [slice(start, start + size) for start in range(0, count, size)]
        parts = [solve(name, p.map(lambda b, r=r: b.rows(r)), count) for r in rows]
        assert close(sum(part[0] for part in parts), loss)
        assert close(torch.cat([part[1] for part in parts]), slope)
        assert close(torch.cat([part[2] for part in parts]), other)


@cells("gradcheck")
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(p=pairs)
def test_the_gradient_is_that_of_the_value(name: str, p: Pairs) -> None:
    inputs = (p.chosen.lp.clone().requires_grad_(), p.rejected.lp.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda w, v: OBJECTIVES[name](w, v, p), inputs)


@cells("swap")
@few
@given(p=pairs)
def test_swapping_the_pair_changes_the_loss_by_the_margin(name: str, p: Pairs) -> None:
    """−log σ(m) + log σ(−m) = −m, times 1 − 2ε (conservative) or 1/(1 − 2ε) (robust)."""
    there = OBJECTIVES[name](p.chosen.lp, p.rejected.lp, p)
    back = OBJECTIVES[name](p.rejected.lp, p.chosen.lp, p.swapped())
    w, v = sums(p.chosen.lp, p.chosen), sums(p.rejected.lp, p.rejected)
    if name == "bradley_terry":
        margin = w[1] - v[1]
    elif name == "simpo_0":
        margin = 2.0 * (w[1] / w[2] - v[1] / v[2])
    elif name == "dpo_norm":
        margin = 0.3 * (w[0] / w[2] - v[0] / v[2])
    else:
        margin = 0.3 * (w[0] - v[0])
    assert close(there - back, -SWAP_FACTOR.get(name, 1.0) * margin)
