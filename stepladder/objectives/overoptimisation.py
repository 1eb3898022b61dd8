"""Over-optimisation curves: what the true (gold) reward does while a proxy is optimised (arXiv:2210.10760).

d = √KL(π‖π_init), KL in nats; R the gold reward gained over the initial policy, R(0) := 0.

    RL           R(d) = d·(α − β·ln d)   peak d* = e^(α/β − 1), R* = β·d*, zero again at e^(α/β)
    best of n    R(d) = d·(α − β·d)      peak d* = α/(2β), R* = α²/(4β), zero again at α/β
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ._checks import require_positive, require_same_shape, working


class GoldCurve(NamedTuple):
    """Coefficients of a fitted curve, both in gold reward per unit of d."""

    alpha: float
    beta: float


class Peak(NamedTuple):
    """Where the gold reward is largest, how large it is, and where it is back at 0."""

    distance: float
    reward: float
    zero: float


def rl_gold_reward(distance: Float[Tensor, "*n"], *, alpha: float, beta: float) -> Float[Tensor, "*n"]:
    """R(d) = d·(α − β·ln d), R(0) = 0. Its slope at 0 is infinite: the form is fitted for d of about 1 and
    above."""
    d = _distances(distance)
    return d * (alpha - beta * torch.where(d > 0, d, 1.0).log())


def best_of_n_gold_reward(distance: Float[Tensor, "*n"], *, alpha: float, beta: float) -> Float[Tensor, "*n"]:
    """R(d) = d·(α − β·d): the gold reward of best-of-n at distance d = √KL."""
    d = _distances(distance)
    return d * (alpha - beta * d)


def rl_peak(*, alpha: float, beta: float) -> Peak:
    """Of the RL curve: d* = e^(α/β − 1), R* = β·d*, zero e^(α/β)."""
    require_positive(alpha=alpha, beta=beta)
    distance = math.exp(alpha / beta - 1)
    return Peak(distance, beta * distance, math.exp(alpha / beta))


def best_of_n_peak(*, alpha: float, beta: float) -> Peak:
    """Of the best-of-n curve: d* = α/(2β), R* = α²/(4β), zero α/β."""
    require_positive(alpha=alpha, beta=beta)
    return Peak(alpha / (2 * beta), alpha**2 / (4 * beta), alpha / beta)


def fit_rl(distance: Float[Tensor, "n"], reward: Float[Tensor, "n"]) -> GoldCurve:
    """α, β of the RL form by least squares on R/d = α − β·ln d."""
    return _fit(distance, reward, _distances(distance).log())


def fit_best_of_n(distance: Float[Tensor, "n"], reward: Float[Tensor, "n"]) -> GoldCurve:
    """α, β of the best-of-n form by least squares on R/d = α − β·d."""
    return _fit(distance, reward, _distances(distance))


def _fit(distance: Tensor, reward: Tensor, regressor: Tensor) -> GoldCurve:
    require_same_shape(distance=distance, reward=reward)
    if not ((distance > 0) & torch.isfinite(reward)).all():
        raise ValueError("the fit divides by d: give distances above 0 and finite rewards (leave out d = 0)")
    x, y = regressor.double(), reward.double() / distance.double()
    spread = ((x - x.mean()) ** 2).sum()
    if x.numel() < 2 or float(spread) == 0.0:
        raise ValueError(
            f"a fit of two coefficients needs at least 2 different distances, got {x.numel()} point(s)"
        )
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    return GoldCurve(float(y.mean() - slope * x.mean()), float(-slope))


def _distances(distance: Tensor) -> Tensor:
    if not (distance >= 0).all():
        raise ValueError("distances must not be negative: d is the square root of a KL divergence")
    return working(distance)
