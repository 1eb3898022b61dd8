"""The squared surrogate of Kimi k1.5: policy mirror descent towards the previous iterate."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import require_finite, require_positive, require_same_shape, working
from .policy_gradient import log_ratios
from .reduce import sum_by_index


def mirror_descent_coefficient(
    rewards: Float[Tensor, "B"],
    baseline: Float[Tensor, "B"],
    log_ratio: Float[Tensor, "B"],
    *,
    tau: float,
) -> Float[Tensor, "B"]:
    """(r − r̄) − τ·log(π_θ(y)/π_i(y)): the factor of ∇log π_θ(y) (arXiv:2501.12599, eq. 3)."""
    require_positive(tau=tau)
    require_same_shape(rewards=rewards, baseline=baseline, log_ratio=log_ratio)
    return rewards - baseline - tau * log_ratio


def squared_surrogate(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    rewards: Float[Tensor, "B"],
    baseline: Float[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    tau: float,
    trajectory_index: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B"]:
    """(r − r̄ − τ·Λ)²/(2τ), Λ = Σ_t m_t(lp_t − prox_t), one loss per row; its gradient is −coefficient·∇log
    π (arXiv:2501.12599; there without the factor 1/(2τ)).

    π_i is the previous iterate, so `proximal_logprobs` are its log-probabilities; the paper resets the
    optimiser at each iteration. Rows of one trajectory are summed and each carries the trajectory's loss,
    so count one of them."""
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards hold NaN or infinity; drop trajectories that could not be scored")
    require_finite(torch.ones_like(baseline, dtype=torch.bool), baseline=baseline)
    summed = log_ratios(logprobs, proximal_logprobs, mask).sum(dim=-1)
    if trajectory_index is not None:
        summed = sum_by_index(summed, trajectory_index)[0]
    r, b = working(rewards.detach()), working(baseline.detach())
    coefficient = mirror_descent_coefficient(r, b, summed, tau=tau)
    return coefficient**2 / (2 * tau)
