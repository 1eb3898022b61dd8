"""Supervised fine-tuning: cross-entropy on the tokens that are to be imitated."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ._checks import (
    masked_mean,
    require_bool,
    require_finite,
    require_same_shape,
    working,
    zero_where_masked,
)


def cross_entropy(
    logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, reweight: bool = False
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """ℓ_t = −log π(y_t | y_<t) in nats, exactly 0 where the mask is False; to be reduced by
    `reduce.aggregate`.

    `logprobs` [B, T] belong to the target token at each position (shifted once, see
    `logprobs.next_token_targets`). `reweight=True` is Dynamic Fine-Tuning (arXiv:2508.05629): ℓ_t =
    −sg(π_t)·log π_t, sg = detached.

    Packed documents need nothing more here: the mask already excludes the first token of each. Metrics:
    `nll`, `perplexity` = exp(nll), `tokens`.
    """
    require_same_shape(logprobs=logprobs, mask=mask)
    require_bool(mask)
    require_finite(mask, logprobs=logprobs.detach())
    chosen = zero_where_masked(mask, working(logprobs))
    losses = -chosen
    if reweight:
        losses = losses * chosen.detach().exp()
    nll = masked_mean(-chosen, mask)
    metrics = {"nll": nll, "perplexity": torch.exp(nll), "tokens": mask.sum()}
    return zero_where_masked(mask, losses), metrics
