"""Supervised fine-tuning, one optimiser step: the token mean of -log p over everything that is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.objectives.reduce import aggregate, step_denominators
from stepladder.objectives.supervised import cross_entropy
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.rungs.accumulate import Metrics, accumulate, take_step
from stepladder.types import TrainingSample


def sft_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    *,
    learning_rate: float,
    token_budget: int,
) -> Metrics:
    """Take one step on the token mean of -log p over all trained tokens of `samples`."""
    metrics = sft_gradients(policy, samples, token_budget=token_budget)
    return {**metrics, "grad_norm": take_step(optimizer, learning_rate)}


def sft_gradients(
    policy: Policy, samples: Sequence[TrainingSample], *, token_budget: int, weight: float = 1.0
) -> Metrics:
    """Add the gradients of `weight` times the token mean of -log p; `loss` comes back without the weight."""
    lengths = torch.tensor([s.num_trained for s in samples])
    denominators = step_denominators(lengths, mode="token_mean")

    def loss(rows: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        scores = policy.logprobs([samples[i] for i in rows])
        losses, metrics = cross_entropy(scores.logprobs, scores.mask)
        part = aggregate(losses, scores.mask, denominators[rows].to(losses.device))
        return part, metrics, scores.tokens_computed

    return accumulate(micro_batches(samples, token_budget), loss, weight=weight)


@torch.no_grad()
def validation_loss(policy: Policy, samples: Sequence[TrainingSample], *, token_budget: int) -> float:
    """Return the mean -log p (nats per token) over the trained tokens of `samples`; nothing is changed."""
    total, tokens = 0.0, 0
    for rows in micro_batches(samples, token_budget):
        scores = policy.logprobs([samples[i] for i in rows])
        total -= float(scores.logprobs.double().sum())
        tokens += int(scores.mask.sum())
    return total / max(tokens, 1)
