"""Advantages of whole trajectories: how much better than its group, its batch or a fixed baseline each one
did.

Rewards come flat, one per trajectory, with an index that says which belong together. Statistics are float64
whatever the input. NaN is "could not be scored" (never 0): such a member leaves every statistic and gets
advantage 0. Credit inside a trajectory (tokens, turns) is in `credit`."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import (
    require_bool,
    require_choice,
    require_finite_number,
    require_float,
    require_same_shape,
)

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group_std", "batch_std", "none"]

# Twelve float32 rewards of 1.15 have a standard deviation of 1e-7, not 0; (r − mean)/(std + 1e-8) makes it
# .886.
EQUAL_TOLERANCE = 1e-6


def equal_within_float_noise(low: Tensor, high: Tensor, mean: Tensor) -> Tensor:
    """The zero guard: max − min ≤ 1e-6·max(1, |mean|), elementwise."""
    return high - low <= EQUAL_TOLERANCE * mean.abs().clamp(min=1.0)


def class_statistics(
    values: Float[Tensor, "n"], index: Int[Tensor, "n"], valid: Bool[Tensor, "n"], *, ddof: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row, over the valid members of its class: (count, mean, standard deviation, equal?), all [n],
    float64.

    Equal classes (`equal_within_float_noise`) and classes with at most `ddof` valid members have deviation
    0. A class without valid members has mean 0 and counts as equal."""
    _, inverse = torch.unique(index, return_inverse=True)
    classes = int(inverse.max()) + 1 if inverse.numel() else 0
    x = torch.where(valid, values.double(), torch.zeros((), dtype=torch.float64, device=values.device))
    zeros = torch.zeros(classes, dtype=torch.float64, device=values.device)
    count = zeros.index_add(0, inverse, valid.double())
    mean = zeros.index_add(0, inverse, x) / count.clamp(min=1)
    square = torch.where(valid, (x - mean[inverse]) ** 2, torch.zeros_like(x))
    variance = zeros.index_add(0, inverse, square) / (count - ddof).clamp(min=1)
    infinite = torch.full_like(x, float("inf"))
    low = infinite[:classes].scatter_reduce(0, inverse, torch.where(valid, x, infinite), "amin")
    high = -infinite[:classes].scatter_reduce(0, inverse, torch.where(valid, -x, infinite), "amin")
    equal = (count == 0) | equal_within_float_noise(low, high, mean)
    std = torch.where(equal | (count <= ddof), zeros, variance.sqrt())
    return count[inverse], mean[inverse], std[inverse], equal[inverse]


def group_advantages(
    rewards: Float[Tensor, "n"],
    group_index: Int[Tensor, "n"],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group_std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Tensor, "n"]:
    """A_i = (R_i − b_i) / (σ_i + eps), one per trajectory, in the dtype of `rewards`.

        baseline  mean            b_i = mean of the group                       GRPO, Dr.GRPO, DAPO
                  leave_one_out   b_i = mean of the others = RLOO (arXiv:2402.14740), G/(G−1)·(R_i − mean)
                  none            b_i = 0
        scale     group_std       σ_i of the group                              GRPO (arXiv:2402.03300)
                  batch_std       σ of all rewards of the batch                 Lite-PPO (arXiv:2508.08221)
                  none            1 without eps                                 Dr.GRPO (arXiv:2503.20783)

    `ddof` 1 is the sample deviation (TRL, verl), 0 the population's (open-instruct); the paper says only
    "std". With a baseline, a group whose rewards are equal within float noise (`equal_within_float_noise`)
    gets exactly 0; so does a group with one scorable member left, and, without a baseline, what would be
    divided by a deviation of 0. Raises for a group of one (verl passes its raw reward on, TRL gives 0), for
    infinite or integer rewards, for mismatched shapes."""
    require_choice("baseline", baseline, get_args(Baseline))
    require_choice("scale", scale, get_args(Scale))
    require_same_shape(rewards=rewards, group_index=group_index)
    require_float(rewards=rewards)
    _require_statistics(ddof, eps)
    if torch.isinf(rewards).any():
        raise ValueError("rewards hold an infinite value; use NaN for a trajectory that could not be scored")
    if baseline != "none":
        _require_no_singleton(group_index)
    valid = ~torch.isnan(rewards)
    count, mean, std, equal = class_statistics(rewards, group_index, valid, ddof=ddof)
    x = torch.where(valid, rewards.double(), torch.zeros((), dtype=torch.float64, device=rewards.device))
    if baseline == "none":
        centred = x
    else:
        centred = x - mean
        if baseline == "leave_one_out":
            centred = centred * count / (count - 1).clamp(min=1)
        centred = torch.where(equal | (count < 2), torch.zeros_like(centred), centred)
    if scale == "batch_std":
        std = class_statistics(rewards, torch.zeros_like(group_index), valid, ddof=ddof)[2]
    if scale != "none":
        centred = torch.where(std > 0, centred / (std + eps), torch.zeros_like(centred))
    return torch.where(valid, centred, torch.zeros_like(centred)).to(rewards.dtype)


def batch_advantages(
    rewards: Float[Tensor, "n"], *, scale: Scale = "group_std", ddof: int = 1, eps: float = 1e-6
) -> Float[Tensor, "n"]:
    """A_i = (R_i − mean of the batch) / (σ of the batch + eps): `group_advantages` with the batch as one
    group."""
    one_group = torch.zeros(rewards.shape, dtype=torch.long, device=rewards.device)
    return group_advantages(rewards, one_group, scale=scale, ddof=ddof, eps=eps)


def constant_advantages(rewards: Float[Tensor, "n"], *, baseline: float = 0.0) -> Float[Tensor, "n"]:
    """A_i = R_i − b with a fixed b (REINFORCE). Equal rewards keep their advantage here. NaN gives 0."""
    require_float(rewards=rewards)
    require_finite_number(baseline=baseline)
    if torch.isinf(rewards).any():
        raise ValueError("rewards hold an infinite value; use NaN for a trajectory that could not be scored")
    return torch.where(torch.isnan(rewards), torch.zeros_like(rewards), rewards - baseline)


def whiten(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    shift: bool = True,
) -> Float[Tensor, "*shape"]:
    """(x − mean)/√(var + eps) over all True positions, 0 elsewhere; `shift=False` adds the mean back.

    REINFORCE++ (arXiv:2501.03262) whitens token advantages over the whole batch, so pass the whole step's,
    not a micro-batch's. verl: ddof 1, eps 1e-8 inside the root, as here; OpenRLHF: ddof 0, variance clamped
    at 1e-8. Values equal within float noise give exactly 0 (their mean with `shift=False`)."""
    require_same_shape(values=values, mask=mask)
    require_bool(mask)
    require_float(values=values)
    _require_statistics(ddof, eps)
    x = values[mask].double()
    if not torch.isfinite(x).all():
        raise ValueError("values hold NaN or infinity at True positions; set the mask to False there")
    out = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if x.numel() == 0:
        return out.to(values.dtype)
    mean = x.mean()
    centred = x - mean
    if equal_within_float_noise(x.min(), x.max(), mean):
        whitened = torch.zeros_like(x)
    else:
        whitened = centred / (centred.pow(2).sum() / max(x.numel() - ddof, 1) + eps).sqrt()
    out[mask] = whitened if shift else whitened + mean
    return out.to(values.dtype)


def group_signal(solve_rate: float, group_size: int) -> tuple[float, float]:
    """(p(1−p), 1 − p^G − (1−p)^G): mean squared advantage without scaling, and the chance that a group
    informs.

    For 0/1 rewards of solve rate p in groups of G. The first is E[A²] per sample (Dr.GRPO,
    arXiv:2503.20783) and peaks at ½; the second is the share of groups that dynamic sampling keeps
    (arXiv:2503.14476)."""
    if not 0.0 <= solve_rate <= 1.0 or group_size < 1:
        raise ValueError(
            f"solve_rate must lie in [0, 1] and group_size be at least 1, got {solve_rate} and {group_size}; "
            "for example 0.5 and 8"
        )
    failure = 1.0 - solve_rate
    return solve_rate * failure, 1.0 - solve_rate**group_size - failure**group_size


def _require_statistics(ddof: int, eps: float) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population) or 1 (sample), got {ddof}")
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}; for example 1e-6")


def _require_no_singleton(group_index: Tensor) -> None:
    indices, sizes = torch.unique(group_index, return_counts=True)
    single = indices[sizes == 1]
    if single.numel():
        raise ValueError(
            f"group {int(single[0])} has one member, so it has no baseline from its group; sample at least 2 "
            "per prompt, or use constant_advantages or a critic"
        )
