"""One optimiser step of RL, and the proof that the sampler was the model being trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepladder.algorithms import Algorithm
from stepladder.data.batching import micro_batches
from stepladder.errors import InvariantError
from stepladder.objectives.corrections import Correction, correction_weights, mismatch_metrics
from stepladder.objectives.kl import kl_estimate
from stepladder.objectives.policy_gradient import SURROGATES
from stepladder.objectives.reduce import aggregate, merge_metrics, step_denominators
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy, Scores
from stepladder.training.step import Metrics, floats
from stepladder.types import TrainingSample


@dataclass(slots=True)
class RlBatch:
    """What one batch of rollouts became. One row a sample; a split trajectory has several rows.

    advantages [n] float32; trajectory_index, group_index [n]. `proximal` is filled by the first update.
    """

    samples: list[TrainingSample]
    advantages: Tensor
    trajectory_index: Tensor
    group_index: Tensor
    proximal: dict[int, Tensor] = field(default_factory=dict)
    reference: dict[int, Tensor] = field(default_factory=dict)


def rl_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    batch: RlBatch,
    row: Algorithm,
    *,
    learning_rate: float,
    temperature: float,
    token_budget: int,
    correction: Correction,
    constant: float | None = None,
    reference: Policy | None = None,
    before_step: Callable[[Metrics], None] | None = None,
) -> Metrics:
    """One update of `batch` by the algorithm `row`.

    Samples without advantage are skipped where nothing else (a KL term) gives them a gradient; they stay
    in the denominators. At the first update of a batch the proximal log-probabilities are the current
    ones. `before_step` sees the metrics while the weights are still those that were measured; what it raises
    leaves them untouched. Returns metrics with `updated` 0.0 when no sample had a signal: then no step was
    taken. Raises ValueError for a KL term in the loss without a `reference`.
    """
    lengths = torch.tensor([s.num_trained for s in batch.samples])
    denominators = step_denominators(
        lengths,
        mode=row.aggregation,
        trajectory_index=batch.trajectory_index,
        group_index=batch.group_index,
        constant=constant,
    )
    with_kl = row.kl_in == "loss" and row.kl_coefficient > 0
    if with_kl and reference is None:
        raise ValueError(
            f"{row.name!r} has a KL term in its loss (coefficient {row.kl_coefficient:g}); give the "
            "reference policy, or a row with kl_coefficient=0"
        )
    live = [i for i in range(len(batch.samples)) if with_kl or float(batch.advantages[i]) != 0.0]
    if not live:
        measured = _measured(policy, batch.samples, temperature, token_budget)
        if before_step is not None:
            before_step(measured)
        return {**measured, "updated": 0.0, "grad_norm": 0.0, "loss": 0.0}
    samples = [batch.samples[i] for i in live]
    parts: list[dict[str, Tensor]] = []
    loss_sum, computed = 0.0, 0
    # micro_batches keeps the rows of a split trajectory in one micro-batch (and they are all live or none:
    # one trajectory, one advantage). So sums over a trajectory are whole here, and the surrogate needs no
    # trajectory_log_ratio or trajectory_length from elsewhere.
    for chunk in micro_batches(samples, token_budget):
        rows = [live[k] for k in chunk]
        scores = policy.logprobs([batch.samples[i] for i in rows], temperature=temperature)
        behaviour = behaviour_logprobs([batch.samples[i] for i in rows], scores)
        proximal = _proximal(batch, rows, scores)
        losses, metrics = SURROGATES[row.surrogate](
            scores.logprobs,
            proximal,
            batch.advantages[rows].to(scores.logprobs.device),
            scores.mask,
            clip_low=row.clip_low,
            clip_high=row.clip_high,
            ratio_level=row.ratio_level,
            trajectory_index=batch.trajectory_index[rows].to(scores.logprobs.device),
            dual_clip=row.dual_clip,
            absolute=row.clip_absolute,
        )
        weights, weight_metrics = correction_weights(
            proximal, behaviour, scores.mask, correction=correction, high=2.0
        )
        metrics |= weight_metrics | mismatch_metrics(proximal, behaviour, scores.mask)
        metrics |= _distances(scores, behaviour)
        losses = losses * weights
        if with_kl and reference is not None:
            anchor = _reference(batch, rows, reference, temperature)
            kl = kl_estimate(scores.logprobs, anchor, scores.mask, estimator=row.kl_estimator)
            losses = losses + row.kl_coefficient * kl
            metrics["kl"] = (kl.detach() * scores.mask).sum() / scores.mask.sum().clamp(min=1)
        loss = aggregate(losses, scores.mask, denominators[rows].to(losses.device))
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
        computed += scores.tokens_computed
        parts.append(metrics)
    merged = floats(merge_metrics(parts))
    if before_step is not None:
        try:
            before_step(merged)
        except BaseException:
            optimizer.clear()
            raise
    norm = optimizer.step(learning_rate)
    extra = {"loss": loss_sum, "grad_norm": norm, "updated": 1.0, "tokens_computed": float(computed)}
    return {**merged, **extra}


def check_on_policy(metrics: Metrics, *, exact_limit: float | None, mean_limit: float) -> None:
    """Stop when the model being trained is not the one that sampled.

    `exact_limit` bounds every trained token's |log ratio| (engine and trainer both fp32), `mean_limit`
    its mean (an engine in another precision). Raises InvariantError with what to look at.
    """
    worst, mean = metrics.get("log_ratio_abs_max", 0.0), metrics.get("log_ratio_abs", 0.0)
    within = worst <= exact_limit if exact_limit is not None else mean <= mean_limit
    if within:  # NaN is not
        return
    allowed = f"{exact_limit:g} for each" if exact_limit is not None else f"{mean_limit:g} on average"
    raise InvariantError(
        "the log-probabilities stored when the tokens were sampled are not those of the model being "
        f"trained: mean difference {mean:.3g} nats a token, largest {worst:.3g} (allowed: {allowed}). "
        "On-policy they are equal. Usual causes: a weight sync that did not arrive, dropout left on, a "
        "temperature applied on one side only, or a mask that is shifted"
    )


def behaviour_logprobs(samples: Sequence[TrainingSample], scores: Scores) -> Tensor:
    """The engine's log-probabilities as [B, T], 0 where the mask is False."""
    out = torch.zeros(scores.logprobs.shape)
    for b, sample in enumerate(samples):
        out[b, : len(sample.token_ids)] = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64).float()
    return out.to(scores.logprobs.device)


@torch.no_grad()
def _measured(
    policy: Policy, samples: Sequence[TrainingSample], temperature: float, token_budget: int
) -> Metrics:
    """How far sampler and policy are apart, on a first part of a batch that gives no gradient.

    Without it an engine on the wrong weights, which earns nothing, would never be found.
    """
    if not samples:
        return {}
    chosen = [samples[i] for i in micro_batches(samples, token_budget)[0]]
    scores = policy.logprobs(chosen, temperature=temperature)
    return floats(_distances(scores, behaviour_logprobs(chosen, scores)))


def _proximal(batch: RlBatch, rows: list[int], scores: Scores) -> Tensor:
    current = scores.logprobs.detach()
    out = torch.zeros_like(current)
    for b, i in enumerate(rows):
        width = len(batch.samples[i].token_ids)
        known = batch.proximal.setdefault(i, current[b, :width].clone())
        out[b, :width] = known
    return out


@torch.no_grad()
def _reference(batch: RlBatch, rows: list[int], reference: Policy, temperature: float) -> Tensor:
    missing = [i for i in rows if i not in batch.reference]
    if missing:
        scores = reference.logprobs([batch.samples[i] for i in missing], temperature=temperature)
        for b, i in enumerate(missing):
            batch.reference[i] = scores.logprobs[b, : len(batch.samples[i].token_ids)]
    out = torch.zeros(len(rows), max(len(batch.samples[i].token_ids) for i in rows), device=reference.device)
    for b, i in enumerate(rows):
        out[b, : len(batch.reference[i])] = batch.reference[i]
    return out


def _distances(scores: Scores, behaviour: Tensor) -> dict[str, Tensor]:
    difference = (scores.logprobs.detach() - behaviour).abs() * scores.mask
    count = scores.mask.sum().clamp(min=1)
    return {
        "log_ratio_abs": difference.sum() / count,
        "log_ratio_abs_max": difference.max(),
        "entropy": (scores.entropy * scores.mask).sum() / count,
    }
