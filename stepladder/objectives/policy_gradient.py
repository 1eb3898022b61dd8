"""Policy-gradient surrogates on padded [B, T] tensors: plain REINFORCE, the clipped surrogate, CISPO.

Notation: lp current log-probability, prox the trainer's just before the update (*proximal*, constant), A
advantage, m mask, r_t = exp(lp_t − prox_t). Each function returns losses per token (0 where the mask is
False), to be multiplied by `corrections` and reduced by `reduce.aggregate`. A row of
`stepladder.algorithms` names the surrogate, the level of its ratio, its clips and its aggregation."""

from typing import Literal, Protocol, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import (
    expand_rows,
    masked_mean,
    require_bool,
    require_choice,
    require_finite,
    require_per_row,
    require_same_shape,
    working,
    zero_where_masked,
)
from .corrections import LOG_RATIO_LIMIT, trajectory_sums

RatioLevel = Literal["token", "sequence", "product"]
Losses = tuple[Float[Tensor, "B T"], dict[str, Tensor]]


class Surrogate(Protocol):
    """What the training loop calls: one signature for all surrogates (see `SURROGATES`)."""

    def __call__(
        self,
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float | None = ...,
        clip_high: float | None = ...,
        ratio_level: RatioLevel = ...,
        trajectory_index: Tensor | None = ...,
        trajectory_log_ratio: Tensor | None = ...,
        trajectory_length: Tensor | None = ...,
        dual_clip: float | None = ...,
        absolute: bool = ...,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def log_ratios(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """log r_t = lp_t − prox_t, differentiable in lp, exactly 0 where the mask is False.

    The difference is masked before anything is exponentiated, so no padding value reaches the value or the
    gradient."""
    require_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, mask=mask)
    require_bool(mask)
    require_finite(mask, logprobs=logprobs.detach(), proximal_logprobs=proximal_logprobs.detach())
    current = zero_where_masked(mask, working(logprobs))
    return current - zero_where_masked(mask, working(proximal_logprobs.detach()))


def ratios(
    log_ratio: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    ratio_level: RatioLevel = "token",
    trajectory_index: Int[Tensor, "B"] | None = None,
    trajectory_log_ratio: Float[Tensor, "B"] | None = None,
    trajectory_length: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """The importance ratio that stands at each token.

        token      r_t = exp(lp_t − prox_t)
        sequence   s = exp(Σ_t m_t(lp_t − prox_t) / |y|)      GSPO, the geometric mean over trained tokens
        product    ρ = exp(Σ_t m_t(lp_t − prox_t))            the completion as one action (RLOO)

    At the trajectory levels the token at t carries sg(s)·exp(lp_t − sg(lp_t)): the value is s, the gradient
    is that of its own token (GSPO-token, arXiv:2507.18071 §4.3). Σ_t over the row then has the gradient of
    the sequence form, and a trajectory may be cut over rows: `trajectory_index` joins rows of this batch;
    when the rows lie in several micro-batches, pass the whole trajectory's Σ log r and token count as
    `trajectory_log_ratio` and `trajectory_length` [B] (computed without gradient). Log-ratios are clamped
    to ±20."""
    require_choice("ratio_level", ratio_level, get_args(RatioLevel))
    if ratio_level == "token":
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    summed, lengths = trajectory_sums(log_ratio.detach(), mask, trajectory_index)
    if trajectory_log_ratio is not None:
        if trajectory_length is None:
            raise ValueError(
                "trajectory_log_ratio needs trajectory_length: the trained tokens it was summed over"
            )
        require_per_row(mask, trajectory_log_ratio=trajectory_log_ratio, trajectory_length=trajectory_length)
        summed, lengths = trajectory_log_ratio.to(summed.dtype), trajectory_length.to(summed.dtype)
    exponent = summed / lengths.clamp(min=1) if ratio_level == "sequence" else summed
    value = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().unsqueeze(-1)
    return value * (log_ratio - log_ratio.detach()).exp()


def reinforce(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    ratio_level: RatioLevel = "token",
    trajectory_index: Int[Tensor, "B"] | None = None,
    trajectory_log_ratio: Float[Tensor, "B"] | None = None,
    trajectory_length: Float[Tensor, "B"] | None = None,
    dual_clip: float | None = None,
    absolute: bool = False,
) -> Losses:
    """ℓ_t = −A_t·lp_t (Williams 1992). No ratio, so no clip: naming one raises instead of being ignored.

    With the aggregation `sequence_sum` this is −A·log π(y), the exact policy gradient. `proximal_logprobs`
    serve the metrics only. Shapes and metrics as in `clipped_surrogate`."""
    if clip_low is not None or clip_high is not None or dual_clip is not None or absolute:
        raise ValueError(
            "reinforce has no ratio to clip; leave clip_low, clip_high, dual_clip and absolute unset"
        )
    if ratio_level != "token" or trajectory_log_ratio is not None:
        raise ValueError(f"reinforce has no ratio, got ratio_level {ratio_level!r}; leave it at 'token'")
    log_ratio = log_ratios(logprobs, proximal_logprobs, mask)
    advantage = _advantages(advantages, mask)
    losses = -advantage * zero_where_masked(mask, working(logprobs))
    ratio = ratios(log_ratio, mask)
    none = torch.zeros_like(mask)
    return zero_where_masked(mask, losses), _metrics(log_ratio, ratio, none, none, advantage, mask)


def clipped_surrogate(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    ratio_level: RatioLevel = "token",
    trajectory_index: Int[Tensor, "B"] | None = None,
    trajectory_log_ratio: Float[Tensor, "B"] | None = None,
    trajectory_length: Float[Tensor, "B"] | None = None,
    dual_clip: float | None = None,
    absolute: bool = False,
) -> Losses:
    """ℓ_t = −min(r·A, clip(r, 1−ε_low, 1+ε_high)·A); for A < 0 with a dual clip c: −max(that minimum, c·A).

    PPO (arXiv:1707.06347), GRPO, DAPO's clip-higher (ε_high .28), GSPO (`ratio_level="sequence"`,
    3e-4/4e-4), RLOO ("product"). dual_clip c > 1 (arXiv:1912.09729) is off by default, unlike verl's 3.
    Inside the clip the gradient for lp_t is −r·A, outside, on the side the advantage points to, exactly 0.

    logprobs, proximal_logprobs [B, T] nats; advantages [B] (one per row) or [B, T]; mask [B, T] bool.
    "sequence" and "product" belong with the aggregations `sequence_mean` and `sequence_sum`: "product" puts
    1/|y| of the trajectory's loss on each token, so that `sequence_sum` gives its value, with the full
    gradient. A None clip is no clip.

    Metrics, means over the trained tokens of this batch with their number `tokens` (merge with
    `reduce.merge_metrics`): ratio, ratio_max, clip_low, clip_high (share of tokens whose gradient the clip
    removes), approx_kl (k3 of current against proximal), zero_advantage."""
    if absolute:
        raise ValueError(
            "absolute caps belong to cispo; clipped_surrogate takes clip_low and clip_high around 1"
        )
    low, high = _bounds(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}; for example dual_clip=3.0")
    log_ratio = log_ratios(logprobs, proximal_logprobs, mask)
    ratio = ratios(
        log_ratio,
        mask,
        ratio_level=ratio_level,
        trajectory_index=trajectory_index,
        trajectory_log_ratio=trajectory_log_ratio,
        trajectory_length=trajectory_length,
    )
    advantage = _advantages(advantages, mask)
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    too_high = (advantage > 0) & (ratio > high) & mask
    too_low = (advantage < 0) & (ratio < low) & mask
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
        too_high = too_high | ((advantage < 0) & (ratio > dual_clip) & mask)
    losses = -objective
    if ratio_level == "product":
        _, lengths = trajectory_sums(log_ratio.detach(), mask, trajectory_index)
        lengths = lengths if trajectory_length is None else trajectory_length.to(losses.dtype)
        share = 1 / lengths.clamp(min=1).unsqueeze(-1)
        losses = losses - losses.detach() * (1 - share)
    return zero_where_masked(mask, losses), _metrics(log_ratio, ratio, too_low, too_high, advantage, mask)


def cispo(
    logprobs: Float[Tensor, "B T"],
    proximal_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B"] | Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float | None = None,
    clip_high: float | None = 0.28,
    ratio_level: RatioLevel = "token",
    trajectory_index: Int[Tensor, "B"] | None = None,
    trajectory_log_ratio: Float[Tensor, "B"] | None = None,
    trajectory_length: Float[Tensor, "B"] | None = None,
    dual_clip: float | None = None,
    absolute: bool = False,
) -> Losses:
    """ℓ_t = −sg(clip(r_t, 1−ε_low, 1+ε_high))·A_t·lp_t (arXiv:2506.13585): every token keeps a gradient.

    The weight is detached. `clip_high` is relative, the cap is 1 + clip_high; with `absolute=True`
    clip_high *is* the cap, as TRL and ScaleRL (arXiv:2510.13786, 5.0) mean it, and clip_low the floor. The
    paper sets no lower bound, so neither do we (verl: 1 − ε_low). Shapes and metrics as in
    `clipped_surrogate`; clip_high counts capped tokens."""
    if ratio_level != "token" or trajectory_log_ratio is not None or dual_clip is not None:
        raise ValueError("cispo weights single tokens; leave ratio_level at 'token' and dual_clip unset")
    low, high = (clip_low, clip_high) if absolute else _bounds(clip_low, clip_high)
    if high is not None and not high > 0:
        raise ValueError(f"the cap must be positive, got {high}; for example absolute=True, clip_high=5.0")
    log_ratio = log_ratios(logprobs, proximal_logprobs, mask)
    ratio = ratios(log_ratio, mask)
    floor = 0.0 if low is None else low
    cap = float("inf") if high is None else high
    weight = ratio.detach().clamp(floor, cap)
    advantage = _advantages(advantages, mask)
    losses = -weight * advantage * zero_where_masked(mask, working(logprobs))
    too_low, too_high = (ratio < floor) & mask, (ratio > cap) & mask
    return zero_where_masked(mask, losses), _metrics(log_ratio, ratio, too_low, too_high, advantage, mask)


SURROGATES: dict[str, Surrogate] = {"reinforce": reinforce, "clip": clipped_surrogate, "cispo": cispo}
"""The surrogates by the name a row of `stepladder.algorithms` uses, all with one signature."""


def _bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    low = 0.0 if clip_low is None else 1 - clip_low
    high = float("inf") if clip_high is None else 1 + clip_high
    if not (low <= 1.0 <= high):
        raise ValueError(
            f"clip_low and clip_high must not be negative, got {clip_low} and {clip_high}; "
            "for example 0.2 and 0.28"
        )
    return max(low, 0.0), high


def _advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    detached = expand_rows(advantages.detach(), mask, "advantages").expand_as(mask)
    require_finite(mask, advantages=detached)
    return zero_where_masked(mask, working(detached))


def _metrics(
    log_ratio: Tensor, ratio: Tensor, too_low: Tensor, too_high: Tensor, advantage: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    log_r, r = log_ratio.detach(), ratio.detach()
    trained = zero_where_masked(mask, r)
    return {
        "ratio": masked_mean(r, mask),
        "ratio_max": trained.max() if trained.numel() else trained.sum(),
        "clip_low": masked_mean(too_low.to(r.dtype), mask),
        "clip_high": masked_mean(too_high.to(r.dtype), mask),
        # Samples of the proximal policy: w − 1 − ln w estimates KL(proximal ‖ current).
        "approx_kl": masked_mean(log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() - 1 - log_r, mask),
        "zero_advantage": masked_mean((advantage == 0).to(r.dtype), mask),
        "tokens": mask.sum(),
    }
