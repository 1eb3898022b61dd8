"""One optimiser step: micro-batches in, summed gradients, one update, metrics out.

The denominators belong to the whole step, so how the batch is cut does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.objectives.reduce import aggregate, merge_metrics, step_denominators
from stepladder.objectives.supervised import cross_entropy
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample

Metrics = dict[str, float]


def sft_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    *,
    learning_rate: float,
    token_budget: int,
) -> Metrics:
    """One step of supervised fine-tuning: the token mean of -log p over all trained tokens of `samples`."""
    metrics = sft_gradients(policy, samples, token_budget=token_budget)
    return {**metrics, "grad_norm": optimizer.step(learning_rate)}


def sft_gradients(
    policy: Policy, samples: Sequence[TrainingSample], *, token_budget: int, weight: float = 1.0
) -> Metrics:
    """Add the gradients of `weight` times the token mean of -log p; `loss` comes back without the weight."""
    lengths = torch.tensor([s.num_trained for s in samples])
    denominators = step_denominators(lengths, mode="token_mean")
    parts: list[dict[str, Tensor]] = []
    loss_sum, computed = 0.0, 0
    for rows in micro_batches(samples, token_budget):
        scores = policy.logprobs([samples[i] for i in rows])
        losses, metrics = cross_entropy(scores.logprobs, scores.mask)
        loss = aggregate(losses, scores.mask, denominators[rows].to(losses.device))
        (weight * loss).backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
        computed += scores.tokens_computed
        parts.append(metrics)
    return {**floats(merge_metrics(parts)), "loss": loss_sum, "tokens_computed": float(computed)}


@torch.no_grad()
def validation_loss(policy: Policy, samples: Sequence[TrainingSample], *, token_budget: int) -> float:
    """Mean -log p (nats a token) over the trained tokens of `samples`, without touching anything."""
    total, tokens = 0.0, 0
    for rows in micro_batches(samples, token_budget):
        scores = policy.logprobs([samples[i] for i in rows])
        total -= float(scores.logprobs.double().sum())
        tokens += int(scores.mask.sum())
    return total / max(tokens, 1)


def floats(metrics: dict[str, Tensor]) -> Metrics:
    return {name: float(value) for name, value in metrics.items()}
