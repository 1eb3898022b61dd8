"""Learning from a teacher's probabilities: generalised Jensen-Shannon, and reverse KL per token on own
samples."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ._checks import require_bool, require_finite, require_same_shape, working, zero_where_masked
from .kl import exact_kl


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
