"""Reward models: Bradley-Terry on answers, cross-entropy on steps, and scores of whole solutions from
steps."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from ._checks import (
    require_all_finite,
    require_bool,
    require_choice,
    require_finite,
    require_finite_number,
    require_same_shape,
    working,
    zero_where_masked,
)

StepAggregation = Literal["product", "min", "last", "mean"]


def preference_probability(
    chosen: Float[Tensor, "*B"], rejected: Float[Tensor, "*B"], *, margin: float | Float[Tensor, "*B"] = 0.0
) -> Float[Tensor, "*B"]:
    """P(chosen beats rejected) = σ(r_w − r_l − margin) (Bradley and Terry 1952)."""
    require_same_shape(chosen=chosen, rejected=rejected)
    return torch.sigmoid(working(chosen) - working(rejected) - margin)


def bradley_terry(
    chosen: Float[Tensor, "B"],
    rejected: Float[Tensor, "B"],
    *,
    margin: float | Float[Tensor, "B"] = 0.0,
    centring: float = 0.0,
) -> tuple[Float[Tensor, "B"], dict[str, Tensor]]:
    """−log σ(r_w − r_l − margin) + c·(r_w + r_l)², one loss per pair.

    Scores r are the head's value at the last token of the answer. Margins as in Llama 2 (arXiv:2307.09288,
    1 to 0 by strength of the preference, or 3 to 0); centring c = .01 (arXiv:2312.09244) fixes the offset
    the first term leaves free. Without centring ∂L/∂r_w = −(1 − P), ∂L/∂r_l = 1 − P. Metrics (`pairs`):
    accuracy (ties are not wins), margin, mean and spread of scores."""
    require_same_shape(chosen=chosen, rejected=rejected)
    require_all_finite(chosen=chosen.detach(), rejected=rejected.detach())
    if isinstance(margin, Tensor):
        require_same_shape(chosen=chosen, margin=margin)
        require_all_finite(margin=margin)
    else:
        require_finite_number(margin=margin)
    if chosen.numel() == 0:
        raise ValueError("the batch holds no pair; pass at least one")
    if not centring >= 0:
        raise ValueError(f"centring must not be negative, got {centring}; for example 0.01")
    w, v = working(chosen), working(rejected)
    losses = softplus(-(w - v - margin)) + centring * (w + v) ** 2
    scores = torch.cat([w, v]).detach()
    metrics = {
        "accuracy": (w > v).to(w.dtype).mean(),
        "margin": (w - v).detach().mean(),
        "score_mean": scores.mean(),
        "score_std": scores.std(correction=0),
        "pairs": torch.tensor(w.numel(), device=w.device),
    }
    return losses, metrics


def bradley_terry_ranked(scores: Float[Tensor, "K"], *, centring: float = 0.0) -> Float[Tensor, ""]:
    """Mean Bradley-Terry loss over all K(K−1)/2 pairs of answers to one prompt, given best first.

    InstructGPT (arXiv:2203.02155) keeps these pairs in one batch element, so that a prompt counts once.
    """
    if scores.numel() < 2:
        raise ValueError(f"a ranking needs at least 2 answers, got {scores.numel()}")
    better, worse = torch.triu_indices(scores.numel(), scores.numel(), offset=1)
    return bradley_terry(scores[better], scores[worse], centring=centring)[0].mean()


def step_cross_entropy(
    logits: Float[Tensor, "B S"], labels: Float[Tensor, "B S"], mask: Bool[Tensor, "B S"]
) -> tuple[Float[Tensor, "B S"], dict[str, Tensor]]:
    """−[y·log σ(z) + (1−y)·log σ(−z)] at the token that ends each step, 0 elsewhere; labels in [0, 1], soft
    allowed (arXiv:2305.20050, arXiv:2312.08935).

    Reduce with `reduce.aggregate` (mode token_mean is the mean over steps of the optimiser step). Metrics:
    accuracy of σ(z) > ½ against y > ½, `tokens` counts steps."""
    require_same_shape(logits=logits, labels=labels, mask=mask)
    require_bool(mask)
    require_finite(mask, logits=logits.detach(), labels=labels)
    z = zero_where_masked(mask, working(logits))
    y = zero_where_masked(mask, labels.to(z.dtype))
    if ((y < 0) | (y > 1)).any():
        raise ValueError("labels must lie in [0, 1]; map ratings such as −1 with prm800k_labels first")
    losses = binary_cross_entropy_with_logits(z, y, reduction="none")
    hits = zero_where_masked(mask, ((z > 0) == (y > 0.5)).to(z.dtype))
    metrics = {"accuracy": hits.sum() / mask.sum().clamp(min=1), "tokens": mask.sum()}
    return zero_where_masked(mask, losses), metrics


def prm800k_labels(ratings: Sequence[int]) -> tuple[list[float], list[bool]]:
    """(labels, supervised?) of a solution's steps from ratings 1, 0, −1 (arXiv:2305.20050).

    Steps are supervised up to and including the first wrong one; a neutral step counts as right.
    """
    unknown = [rating for rating in ratings if rating not in (-1, 0, 1)]
    if unknown:
        raise ValueError(f"ratings must be 1 (good), 0 (neutral) or -1 (wrong), got {unknown[0]}")
    labels = [0.0 if rating == -1 else 1.0 for rating in ratings]
    first_wrong = labels.index(0.0) if 0.0 in labels else len(labels)
    return labels, [step <= first_wrong for step in range(len(labels))]


def math_shepherd_label(completions: Sequence[bool], *, soft: bool = False) -> float:
    """A step's label from completions sampled after it: 1 if any is right (hard), or their share (soft).

    arXiv:2312.08935, whose main results use the hard form with 8 completions.
    """
    if not completions:
        raise ValueError("a Math-Shepherd label needs at least one completion; the paper samples 8")
    share = sum(bool(right) for right in completions) / len(completions)
    return share if soft else float(share > 0)


def solution_score(
    step_logprobs: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    aggregation: StepAggregation = "product",
) -> Float[Tensor, "B"]:
    """One probability per solution from log p of its steps: product, min, last, or (arithmetic) mean.

    product: Let's Verify (arXiv:2305.20050), summed in log space; min: Math-Shepherd; last:
    arXiv:2408.03314. Product and min fall with the number of steps, so they prefer short solutions. A
    solution without steps raises."""
    require_choice("aggregation", aggregation, get_args(StepAggregation))
    require_same_shape(step_logprobs=step_logprobs, mask=mask)
    require_bool(mask)
    if not mask.any(dim=-1).all():
        raise ValueError("a solution has no step; give every solution at least one True in the mask")
    logp = working(step_logprobs)
    if not (zero_where_masked(mask, logp) <= 0).all():
        raise ValueError("step_logprobs hold a value above 0 or NaN; pass logarithms of probabilities")
    if aggregation == "product":
        return zero_where_masked(mask, logp).sum(dim=-1).exp()
    if aggregation == "min":
        return torch.where(mask, logp, torch.full_like(logp, float("inf"))).amin(dim=-1).exp()
    if aggregation == "last":
        position = torch.arange(mask.shape[-1], device=mask.device)
        last = torch.where(mask, position, -1).amax(dim=-1)
        return logp.gather(-1, last.unsqueeze(-1)).squeeze(-1).exp()
    return zero_where_masked(mask, logp.exp()).sum(dim=-1) / mask.sum(dim=-1)


def verifier_probability(
    yes_logit: Float[Tensor, "*B"], no_logit: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """e^yes/(e^yes + e^no) = σ(yes − no): a generative verifier's score (SWE-Gym, arXiv:2412.21139)."""
    return preference_probability(yes_logit, no_logit)


def calibration_error(
    probabilities: Float[Tensor, "n"], outcomes: Bool[Tensor, "n"], *, bins: int = 10
) -> Float[Tensor, ""]:
    """Expected calibration error Σ_b (n_b/n)·|mean p − share right| over equal-width bins
    (arXiv:1706.04599)."""
    require_same_shape(probabilities=probabilities, outcomes=outcomes)
    if probabilities.numel() == 0 or bins < 1:
        raise ValueError(f"need at least one probability and one bin, got {probabilities.numel()} and {bins}")
    p = working(probabilities)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("probabilities must lie in [0, 1]")
    which = (p * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=p.dtype, device=p.device).index_add(0, which, p - outcomes.to(p.dtype))
    return gaps.abs().sum() / p.numel()
