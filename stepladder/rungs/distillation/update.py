"""One optimiser step towards a teacher: a divergence over the vocabulary, or an advantage a sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.objectives.distillation import chunked_js, on_policy_distillation_advantages
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.rungs.accumulate import Metrics, accumulate, take_step
from stepladder.rungs.distillation.teacher import heads
from stepladder.types import TrainingSample


def distillation_update(
    policy: Policy,
    teacher: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    *,
    loss: Literal["divergence", "sampled"],
    beta: float,
    temperature: float,
    learning_rate: float,
    token_budget: int,
) -> Metrics:
    """The token mean over everything that is trained in `samples`; both models at `temperature`.

    `teacher_kl` is KL(policy‖teacher) in nats a token: exact with the divergence, else k1 on the samples.
    Without a trained token, where no episode had room for one, nothing moves.
    """
    tokens = sum(s.num_trained for s in samples)
    if not tokens:
        return {"grad_norm": 0.0, "tokens": 0.0, "tokens_computed": 0.0, "learning_rate": learning_rate}
    distances: list[float] = []

    def part_loss(rows: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        chosen = [samples[i] for i in rows]
        if loss == "divergence":
            losses, kl, computed = _divergence(policy, teacher, chosen, beta=beta, temperature=temperature)
            part = losses.sum() / tokens
        else:
            part, kl, computed = _sampled(policy, teacher, chosen, tokens, temperature)
        distances.append(float(kl.double().sum()))
        return part, {}, computed

    metrics = accumulate(micro_batches(samples, token_budget), part_loss)
    return {
        **metrics,
        "teacher_kl": sum(distances) / tokens,
        "grad_norm": take_step(optimizer, learning_rate),
        "tokens": float(tokens),
        "learning_rate": learning_rate,
    }


def _divergence(
    policy: Policy, teacher: Policy, samples: Sequence[TrainingSample], *, beta: float, temperature: float
) -> tuple[Tensor, Tensor, int]:
    """(losses [n], KL [n], tokens computed) of the n trained tokens of `samples`."""
    before = [[t - 1 for t, trained in enumerate(s.mask) if trained] for s in samples]
    hidden, computed = policy.hidden_at(samples, before)
    with torch.no_grad():
        other, _ = teacher.hidden_at(samples, before)
    (ours, bias), (theirs, other_bias) = heads(policy, teacher)
    losses, kl = chunked_js(
        hidden,
        ours,
        other,
        theirs,
        student_bias=bias,
        teacher_bias=other_bias,
        beta=beta,
        temperature=temperature,
    )
    return losses, kl, computed


def _sampled(
    policy: Policy, teacher: Policy, samples: Sequence[TrainingSample], tokens: int, temperature: float
) -> tuple[Tensor, Tensor, int]:
    """(loss, KL estimates, tokens computed): −A_t · ratio_t, whose gradient is A_t times that of −log p_t."""
    scores = policy.logprobs(samples, temperature=temperature)
    with torch.no_grad():
        other = teacher.logprobs(samples, temperature=temperature)
    advantages = on_policy_distillation_advantages(scores.logprobs, other.logprobs, scores.mask)
    ratio = (scores.logprobs - scores.logprobs.detach()).exp()
    loss = (-advantages * ratio)[scores.mask].sum() / tokens
    return loss, -advantages[scores.mask], scores.tokens_computed
