"""Signals of collapse that need more than one number of a run: template collapse, and groups worth training
on."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class CollapseSignal(NamedTuple):
    """How much the reasoning Z depends on its prompt X, in nats per sequence.

    Collapse shows as high `conditional_entropy` with low `mutual_information`: varied but input-agnostic
    reasoning."""

    conditional_entropy: Tensor
    """H(Z|X) = −mean log p(z|its own prompt)"""
    marginal_entropy: Tensor
    """H(Z) = −mean log (1/N)·Σ_j p(z|x_j)"""
    mutual_information: Tensor
    """mean of own minus marginal; at most `bound`, slightly negative from few samples"""
    bound: Tensor
    """ln N"""
    retrieval_accuracy: Tensor
    """share of z whose most likely prompt is its own; ties go to the first; chance is 1/N"""


def template_collapse(cross_logprobs: Float[Tensor, "n N"], prompt_index: Int[Tensor, "n"]) -> CollapseSignal:
    """Mutual information between reasoning and prompt from the cross matrix ℓ[z, j] = log p(z | x_j), in
    nats.

    RAGEN-2 (arXiv:2604.06268): log p summed over the reasoning tokens only; `prompt_index` is each z's own
    column. The token-averaged variant is a heuristic, not a mutual information. Prompts must be distinct.
    """
    samples, prompts = cross_logprobs.shape
    if prompt_index.shape != (samples,) or samples == 0:
        raise ValueError(
            f"need one prompt index per row of the cross matrix, got {tuple(prompt_index.shape)}"
        )
    if int(prompt_index.min()) < 0 or int(prompt_index.max()) >= prompts:
        raise ValueError(f"prompt_index must lie in [0, {prompts}), got {prompt_index.tolist()}")
    if not torch.isfinite(cross_logprobs).all():
        raise ValueError("cross_logprobs hold NaN or infinity; score every reasoning under every prompt")
    ell = cross_logprobs.double()
    matched = ell.gather(1, prompt_index.unsqueeze(1).long()).squeeze(1)
    bound = torch.tensor(float(prompts), dtype=torch.float64).log()
    marginal = torch.logsumexp(ell, dim=1) - bound
    hits = ell.argmax(dim=1) == prompt_index
    return CollapseSignal(
        conditional_entropy=-matched.mean(),
        marginal_entropy=-marginal.mean(),
        mutual_information=(matched - marginal).mean(),
        bound=bound,
        retrieval_accuracy=hits.double().mean(),
    )


def variance_top_p(
    variances: Float[Tensor, "n"], *, share: float = 0.9, slack: float = 0.01
) -> Bool[Tensor, "n"]:
    """Groups to keep: the highest reward variances until their sum reaches share·Σ − slack, never a zero one.

    RAGEN-2's filter (arXiv:2604.06268, linear form): sorted downwards, a group is taken while the sum so
    far is below the threshold. Ties keep their order."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1], got {share}; for example 0.9")
    if not (variances >= 0).all():
        raise ValueError("variances must be finite and not negative")
    v = variances.double()
    threshold = share * v.sum() - slack
    order = torch.argsort(v, descending=True, stable=True)
    ordered = v[order]
    before = ordered.cumsum(0) - ordered
    kept = torch.zeros_like(v, dtype=torch.bool)
    kept[order] = (before < threshold) & (ordered > 0)
    return kept
