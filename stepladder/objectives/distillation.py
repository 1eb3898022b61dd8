"""Learning from a teacher's probabilities: generalised Jensen-Shannon, and reverse KL per token on own
samples."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ._checks import (
    require_bool,
    require_finite,
    require_positive,
    require_same_shape,
    working,
    zero_where_masked,
)
from .kl import exact_kl
from .logprobs import head_logits


def generalised_js(
    student_logp: Float[Tensor, "*N V"], teacher_logp: Float[Tensor, "*N V"], *, beta: float = 0.5
) -> Float[Tensor, "*N"]:
    """β·KL(P‖M) + (1−β)·KL(Q‖M), M = β·P + (1−β)·Q; P teacher, Q student; nats (GKD, arXiv:2306.13649).

    The ends are set, not limits (which are 0): β = 0 is KL(P‖Q), the forward direction; β = 1 is KL(Q‖P),
    the reverse. Inputs are log-probabilities over the whole vocabulary; the teacher's is detached.
    Differentiable in the student's."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must lie in [0, 1], got {beta}; for example 0.5")
    require_same_shape(student_logp=student_logp, teacher_logp=teacher_logp)
    student, teacher = working(student_logp), working(teacher_logp.detach())
    if beta == 0.0:
        return exact_kl(teacher, student)
    if beta == 1.0:
        return exact_kl(student, teacher)
    # What both hold for impossible stays so; logaddexp has no gradient at (−∞, −∞).
    impossible = torch.isneginf(student) & torch.isneginf(teacher)
    p, q = teacher.masked_fill(impossible, 0.0), student.masked_fill(impossible, 0.0)
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    mixture = mixture.masked_fill(impossible, -torch.inf)
    return beta * exact_kl(teacher, mixture) + (1 - beta) * exact_kl(student, mixture)


def on_policy_distillation_advantages(
    student_logprobs: Float[Tensor, "B T"], teacher_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """A_t = −(lp_student − lp_teacher) for tokens the student sampled, detached, 0 where the mask is False.

    Minus k1 of KL(student‖teacher), each token judged by itself (discount 0); use it as advantage of a
    surrogate (K. Lu, "On-policy distillation", 2025)."""
    require_same_shape(student_logprobs=student_logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    require_bool(mask)
    student, teacher = student_logprobs.detach(), teacher_logprobs.detach()
    require_finite(mask, student_logprobs=student, teacher_logprobs=teacher)
    return zero_where_masked(mask, working(teacher) - working(student))


def chunked_js(
    student_hidden: Float[Tensor, "N d"],
    student_head: Float[Tensor, "V d"],
    teacher_hidden: Float[Tensor, "N e"],
    teacher_head: Float[Tensor, "V e"],
    *,
    student_bias: Float[Tensor, "V"] | None = None,
    teacher_bias: Float[Tensor, "V"] | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk: int = 256,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """(`generalised_js`, KL(student‖teacher)) [N] in nats from hidden states; z = (h·Wᵀ + b)/T on both sides.

    At most `chunk` rows of logits exist at a time: each chunk is computed again in the backward pass. The KL
    is for watching and has no gradient. Gradients go to the student: hidden states, head and bias. The models
    may differ in width, not in vocabulary. Logits are float32 also of half-precision heads, whose rounding
    would be most of a small divergence.
    """
    require_positive(temperature=temperature, chunk=chunk)
    if student_head.shape[0] != teacher_head.shape[0] or len(student_hidden) != len(teacher_hidden):
        raise ValueError(
            f"student and teacher must score the same tokens over one vocabulary; got {len(student_hidden)} "
            f"and {len(teacher_hidden)} rows, {student_head.shape[0]} and {teacher_head.shape[0]} tokens"
        )

    def piece(hidden: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
        student = torch.log_softmax(head_logits(hidden, weight, bias) / temperature, dim=-1)
        with torch.no_grad():
            teacher = torch.log_softmax(head_logits(other, teacher_head, teacher_bias) / temperature, dim=-1)
            distance = exact_kl(student.detach(), teacher)
        return generalised_js(student, teacher, beta=beta), distance

    found: list[tuple[Tensor, Tensor]] = []
    again: Callable[..., tuple[Tensor, Tensor]] = checkpoint
    for start in range(0, len(student_hidden), chunk):
        rows = slice(start, start + chunk)
        other = teacher_hidden[rows].detach()
        found.append(
            again(piece, student_hidden[rows], student_head, student_bias, other, use_reentrant=False)
        )
    losses, distances = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(distances)
