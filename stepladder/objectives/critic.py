"""The critic's loss."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ._checks import (
    masked_mean,
    require_bool,
    require_finite,
    require_positive,
    require_same_shape,
    working,
    zero_where_masked,
)


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip: float | None = 0.2,
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) per token; `clip=None` is ½(V − R)².

    PPO's value clip (arXiv:1707.06347, code). Targets R are advantages + values from before whitening
    (`credit.gae`). Everything in reward units. Metrics: value_clip (share of tokens whose gradient the clip
    removes), value_mean, return_mean, explained_variance of the old values, tokens."""
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    require_bool(mask)
    require_finite(mask, values=values.detach(), old_values=old_values, returns=returns)
    v = zero_where_masked(mask, working(values))
    old, target = zero_where_masked(mask, working(old_values)), zero_where_masked(mask, working(returns))
    old, target = old.detach(), target.detach()
    error = (v - target) ** 2
    clipped_share = torch.zeros_like(mask)
    if clip is not None:
        require_positive(clip=clip)
        clipped = (old + (v - old).clamp(-clip, clip) - target) ** 2
        clipped_share = (clipped > error) & mask
        error = torch.maximum(error, clipped)
    mean = masked_mean(target, mask)
    variance = masked_mean((target - mean) ** 2, mask)
    residual = masked_mean((target - old) ** 2, mask)
    metrics = {
        "value_clip": masked_mean(clipped_share.to(v.dtype), mask),
        "value_mean": masked_mean(v, mask),
        "return_mean": mean,
        "explained_variance": torch.where(
            variance > 0, 1 - residual / variance.clamp(min=1e-30), torch.zeros_like(variance)
        ),
        "tokens": mask.sum(),
    }
    return zero_where_masked(mask, 0.5 * error), metrics
