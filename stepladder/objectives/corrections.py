"""Corrections for tokens that were sampled by another model than the one being trained.

Names: *behaviour* log-probabilities come from the engine and are stored with the token; *proximal* ones
from the trainer just before the update; w_t = π_proximal / π_behaviour = exp(lp_proximal − lp_behaviour).
Every weight here is detached: it multiplies the token loss and is never differentiated. A token whose
weight is 0 stays in the denominator (IcePop; AReaL keeps it too), so that dropping tokens cannot enlarge
the others' step."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import (
    masked_mean,
    require_bool,
    require_choice,
    require_finite,
    require_per_row,
    require_positive,
    require_same_shape,
    working,
    zero_where_masked,
)
from .reduce import sum_by_index

Correction = Literal["none", "token_cap", "token_mask", "sequence_cap", "sequence_mask", "geometric_mask"]

# What multiplies the loss, what is held against the bounds, and whether to cap there or to drop beyond.
_RULES: dict[str, tuple[str, str, str]] = {
    "none": ("one", "one", "mask"),
    "token_cap": ("token", "token", "cap"),
    "token_mask": ("token", "token", "mask"),
    "sequence_cap": ("product", "product", "cap"),
    "sequence_mask": ("product", "product", "mask"),
    "geometric_mask": ("token", "mean", "mask"),
}

# exp(±20) is far outside every band used here and still finite in float32.
LOG_RATIO_LIMIT = 20.0


def log_weights(
    proximal_logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """log w_t = lp_proximal − lp_behaviour, detached, 0 where the mask is False.

    A missing (NaN) behaviour log-probability on a trained token raises: counted as ratio 1 it would pass
    unseen."""
    require_same_shape(proximal_logprobs=proximal_logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask)
    require_bool(mask)
    proximal, behaviour = proximal_logprobs.detach(), behaviour_logprobs.detach()
    require_finite(mask, proximal_logprobs=proximal, behaviour_logprobs=behaviour)
    return zero_where_masked(mask, working(proximal) - working(behaviour))


def trajectory_sums(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], trajectory_index: Int[Tensor, "B"] | None
) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
    """(Σ values over the trained tokens of each row's trajectory, how many tokens these are), one per row."""
    sums = zero_where_masked(mask, values).sum(dim=-1)
    lengths = mask.sum(dim=-1).to(sums.dtype)
    if trajectory_index is None:
        return sums, lengths
    return sum_by_index(sums, trajectory_index)[0], sum_by_index(lengths, trajectory_index)[0]


def correction_weights(
    proximal_logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    correction: Correction,
    low: float | None = None,
    high: float = 2.0,
    trajectory_index: Int[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """Weights [B, T] for the token losses, and the share of tokens they touched.

        none            1
        token_cap       clip(w_t, low, high)               truncated importance sampling, high 2
        token_mask      w_t·1[low ≤ w_t ≤ high]            IcePop (arXiv:2510.18855), MIS; 0.5 to 5
        sequence_cap    clip(Π_t w_t, low, high)           one weight for the whole trajectory
        sequence_mask   Πw·1[low ≤ Πw ≤ high]              TRL's default, high 3
        geometric_mask  w_t·1[low ≤ (Πw)^(1/len) ≤ high]   needs a tight band, 0.999 to 1.001

    Products run over the trained tokens of the trajectory (`trajectory_index` joins rows that were split).
    Where the surrogate already divides by the behaviour policy (proximal := behaviour), use "none": it
    contains w. OpenRLHF's sequence mask multiplies the token weight unclamped; that is not offered.
    `low=None` sets no lower bound."""
    require_choice("correction", correction, get_args(Correction))
    require_positive(high=high)
    if not (low or 0.0) <= 1.0 <= high:
        raise ValueError(f"the bounds must enclose 1, got low={low} and high={high}; for example 0.5 and 2.0")
    log_w = log_weights(proximal_logprobs, behaviour_logprobs, mask)
    summed, lengths = trajectory_sums(log_w, mask, trajectory_index)
    per_row = {"product": summed, "mean": summed / lengths.clamp(min=1)}
    logs = {"one": torch.zeros_like(log_w), "token": log_w}
    logs |= {name: value.unsqueeze(-1).expand_as(log_w) for name, value in per_row.items()}
    weighs, judged, cut = _RULES[correction]
    weights, judge = (logs[name].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() for name in (weighs, judged))
    kept = judge <= high if low is None else (judge <= high) & (judge >= low)
    weights = weights.clamp(min=low, max=high) if cut == "cap" else weights * kept
    weights = zero_where_masked(mask, weights)
    metrics = {
        "correction_weight": masked_mean(weights, mask),
        "correction_touched": masked_mean((~kept).to(weights.dtype), mask),
        "tokens": mask.sum(),
    }
    return weights, metrics


def off_policy_sequence_mask(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    threshold: float = 0.5,
    trajectory_index: Int[Tensor, "B"] | None = None,
) -> Bool[Tensor, "B"]:
    """DeepSeek-V3.2's keep rule (arXiv:2512.02556): drop a row iff A < 0 and mean_t(lp_old − lp_θ) >
    threshold.

    A trajectory of negative advantage that the policy already left is not pushed away further. Returns True
    for kept rows; multiply the token losses by it (the denominator stays)."""
    require_per_row(mask, advantages=advantages)
    require_finite(mask.any(dim=-1), advantages=advantages)
    drift = log_weights(proximal_logprobs, logprobs, mask)
    summed, lengths = trajectory_sums(drift, mask, trajectory_index)
    return ~((advantages < 0) & (summed / lengths.clamp(min=1) > threshold))


def mismatch_metrics(
    proximal_logprobs: Float[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> dict[str, Tensor]:
    """How far the trainer's model is from the one that sampled, over trained tokens (samples of the engine).

        mismatch_k1    mean(lp_behaviour − lp_proximal)      an estimate of KL(behaviour ‖ proximal), in nats
        mismatch_k3    mean(w − 1 − ln w)                    the same, never negative
        ppl_ratio      exp(mismatch_k1)
        chi2           mean(w²) − 1
        ess            (Σw)² / (n·Σw²)                       effective sample size as a share, 1 is on-policy
        mismatch_max   max |lp_behaviour − lp_proximal|

    All zeros (ratio and ess 1) when nothing is trained.
    """
    log_w = log_weights(proximal_logprobs, behaviour_logprobs, mask)
    w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    k1 = masked_mean(-log_w, mask)
    trained = zero_where_masked(mask, w)
    count = mask.sum()
    square = (trained**2).sum()
    ess = torch.where(count > 0, trained.sum() ** 2 / (count * square).clamp(min=1e-30), torch.ones_like(k1))
    return {
        "mismatch_k1": k1,
        "mismatch_k3": masked_mean(w - 1 - log_w, mask),
        "ppl_ratio": k1.exp(),
        "chi2": torch.where(count > 0, masked_mean(w**2, mask) - 1, torch.zeros_like(k1)),
        "ess": ess,
        "mismatch_max": log_w.abs().max() if log_w.numel() else torch.zeros_like(k1),
        "tokens": count,
    }
