"""Divergence from a reference policy and entropy: estimates from samples, exact values, adaptive
coefficients.

d_t = lp_t − ref_t for tokens sampled from the current policy π; KL(π‖ref) = E[d].

    k1 = d                  unbiased; as a differentiated loss its expected gradient is 0
    k2 = d²/2               biased value; expected gradient ∇KL(π‖ref)
    k3 = e^(−d) − 1 + d     unbiased, never negative; expected gradient ∇KL(ref‖π), the forward direction

So a penalty in the reward takes k1; a penalty in the loss takes k2 for the true reverse KL, or k3 for
GRPO's tradition (J. Schulman, "Approximating KL divergence", 2020; arXiv:2402.03300). The gradients hold
per token: summed per-token k2 or k3 do not have the gradient of the *sequence's* KL, `sequence_k2` has."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import (
    require_bool,
    require_choice,
    require_finite,
    require_finite_number,
    require_positive,
    require_same_shape,
    working,
    zero_where_masked,
)
from .corrections import LOG_RATIO_LIMIT
from .policy_gradient import log_ratios
from .reduce import sum_by_index

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    estimator: Estimator = "k3",
    sampling_logprobs: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """k1, k2 or k3 per token in nats, 0 where the mask is False, differentiable in `logprobs`.

    With `sampling_logprobs` (those of the policy that drew the tokens, constant) the estimate is multiplied
    by r_t = exp(lp_t − sampling_t), differentiable: DeepSeek-V3.2's off-policy form (arXiv:2512.02556),
    unbiased in value and gradient: E_old[r·k1] and E_old[r·k3] = KL(π‖ref), gradients included. The
    exponent of r is clamped to ±20; in k3, d is held at −20 and above, beyond which it is constant (its
    exponent alone clamped, k3 would push π further away there)."""
    require_choice("estimator", estimator, get_args(Estimator))
    d = log_ratios(logprobs, reference_logprobs, mask)
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = 0.5 * d**2
    else:
        held = d.clamp(min=-LOG_RATIO_LIMIT)
        estimate = (-held).exp() - 1 + held
    if sampling_logprobs is not None:
        drift = log_ratios(logprobs, sampling_logprobs, mask)
        estimate = estimate * drift.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return zero_where_masked(mask, estimate)


def sequence_k2(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    trajectory_index: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B"]:
    """½(Σ_t d_t)² [B]: the loss whose expected gradient is that of the sequence-level KL(π‖ref).

    Rows of one trajectory (`trajectory_index`) are summed before squaring and each carries the trajectory's
    value, so count one of them."""
    d = log_ratios(logprobs, reference_logprobs, mask).sum(dim=-1)
    if trajectory_index is not None:
        d = sum_by_index(d, trajectory_index)[0]
    return 0.5 * d**2


def exact_kl(log_p: Float[Tensor, "*N V"], log_q: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """KL(p‖q) = Σ_v p_v·(ln p_v − ln q_v) in nats over the last dimension, from log-probabilities.

    Outcomes with p = 0 (ln p = −∞) add 0.
    """
    require_same_shape(log_p=log_p, log_q=log_q)
    p = working(log_p)
    possible = torch.isfinite(p)
    gap = torch.where(possible, p - working(log_q), torch.zeros_like(p))
    return (p.exp() * gap).sum(dim=-1)


def exact_entropy(log_p: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """H(p) = −Σ_v p_v·ln p_v in nats over the last dimension, from log-probabilities; 0·ln 0 is 0."""
    p = working(log_p)
    finite = torch.where(torch.isfinite(p), p, torch.zeros_like(p))
    return -(p.exp() * finite).sum(dim=-1)


def adaptive_kl_coefficient(
    coefficient: float, *, kl: float, target: float, samples: int, horizon: int
) -> float:
    """β ← β·(1 + clip(KL/target − 1, ±.2)·n/horizon) (Ziegler et al., arXiv:1909.08593).

    `kl` and `target` in nats per sequence, `samples` n and `horizon` in episodes.
    """
    require_positive(coefficient=coefficient, target=target, samples=samples, horizon=horizon)
    require_finite_number(kl=kl)
    if samples >= 5 * horizon:
        raise ValueError(
            f"samples must stay below 5 times the horizon, or the coefficient falls to 0, got {samples} and "
            f"{horizon}; for example horizon=10000"
        )
    error = max(-0.2, min(0.2, kl / target - 1.0))
    return coefficient * (1.0 + error * samples / horizon)


def adaptive_entropy_coefficient(
    coefficient: float, *, entropy: float, target: float, delta: float = 0.005
) -> tuple[float, float]:
    """(next coefficient, coefficient to apply now): ±δ towards the target, applied only while entropy ≤
    target.

    Skywork-OR1 (arXiv:2505.22312). Entropy and target in nats per token; the coefficient never falls below 0.
    """
    require_positive(delta=delta)
    require_finite_number(coefficient=coefficient, entropy=entropy, target=target)
    moved = coefficient + delta if entropy < target else coefficient - delta
    following = max(moved, 0.0)
    return following, following if entropy <= target else 0.0


def high_entropy_mask(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, share: float = 0.2
) -> Bool[Tensor, "B T"]:
    """The `share` of trained tokens with the highest entropy (arXiv:2506.01939), at least one if any is
    trained.

    Ties at the threshold are all kept, so that the choice does not depend on order.
    """
    require_same_shape(entropy=entropy, mask=mask)
    require_bool(mask)
    require_finite(mask, entropy=entropy)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1], got {share}; for example 0.2")
    chosen = entropy[mask]
    if chosen.numel() == 0:
        return mask.clone()
    keep = max(1, round(share * chosen.numel()))
    threshold = chosen.topk(keep).values[-1]
    return mask & (entropy >= threshold)
