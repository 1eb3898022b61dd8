"""KTO: learning from single answers marked desirable or not (arXiv:2402.01306)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import require_all_finite, require_bool, require_positive, require_same_shape, working


def mismatched_answers(count: int) -> Int[Tensor, "n"]:
    """For each prompt i of a batch the answer it is paired with to estimate the reference point: i − 1,
    rolled.

    The pairs (x_i, y_{i−1}) must not be true pairs, so at least two are needed.
    """
    if count < 2:
        raise ValueError(
            f"KTO needs a batch of at least 2 to form mismatched pairs, got {count}; for example 8"
        )
    return torch.arange(count).roll(1)


def kto_reference_point(mismatched_log_ratio: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """z0 = max(0, mean of log π_θ(y')/π_ref(y') over mismatched pairs), detached, in nats: an estimate of
    the KL.

    Pass the pairs of the whole step, over micro-batches and ranks: the mean is taken before the clamp. It
    is *not* yet multiplied by β; `kto` does that (the paper's code and TRL agree; formulas with r =
    β·log-ratio hide it)."""
    if mismatched_log_ratio.numel() < 2:
        raise ValueError(
            f"KTO's reference point needs at least 2 mismatched pairs, got {mismatched_log_ratio.numel()}; "
            "use a batch of 2 or more"
        )
    require_all_finite(mismatched_log_ratio=mismatched_log_ratio.detach())
    return working(mismatched_log_ratio.detach()).mean().clamp(min=0.0)


def kto_value(
    log_ratio: Float[Tensor, "B"],
    desirable: Bool[Tensor, "B"],
    reference_point: Float[Tensor, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, "B"]:
    """v = λ_D·σ(β(ρ − z0)) if desirable, λ_U·σ(β(z0 − ρ)) if not; ρ = log π_θ(y)/π_ref(y), summed, nats."""
    require_same_shape(log_ratio=log_ratio, desirable=desirable)
    require_bool(desirable, "desirable")
    require_positive(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if reference_point.shape != ():
        raise ValueError(
            f"reference_point has shape {tuple(reference_point.shape)}; pass the one number of "
            "kto_reference_point, taken over the whole step"
        )
    require_all_finite(log_ratio=log_ratio.detach(), reference_point=reference_point.detach())
    above = beta * (working(log_ratio) - reference_point.detach())
    gain = desirable_weight * torch.sigmoid(above)
    return torch.where(desirable, gain, undesirable_weight * torch.sigmoid(-above))


def kto(
    log_ratio: Float[Tensor, "B"],
    desirable: Bool[Tensor, "B"],
    reference_point: Float[Tensor, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Float[Tensor, "B"], dict[str, Tensor]]:
    """λ_y − v(x, y), one loss per answer, with v from `kto_value`; average over the answers of the step.

    Metrics: mean implicit reward of desirable and undesirable answers, the reference point β·z0; `pairs`
    counts answers."""
    value = kto_value(
        log_ratio,
        desirable,
        reference_point,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    # where() on two plain numbers would give float32 and lose digits of a float64 loss
    weight = torch.full_like(value, undesirable_weight).masked_fill(desirable, desirable_weight)
    reward = beta * working(log_ratio.detach())
    up, down = desirable.to(reward.dtype), (~desirable).to(reward.dtype)
    metrics = {
        "reward_desirable": (reward * up).sum() / up.sum().clamp(min=1),
        "reward_undesirable": (reward * down).sum() / down.sum().clamp(min=1),
        "reference_point": beta * reference_point.detach(),
        "pairs": torch.tensor(log_ratio.numel(), device=log_ratio.device),
    }
    return weight - value, metrics


def kto_balance(
    desirable_count: int, undesirable_count: int, *, desirable_weight: float, undesirable_weight: float
) -> float:
    """λ_D·n_D / (λ_U·n_U), which the final paper wants in [1, 3/2] (an early version and TRL: [1, 4/3])."""
    require_positive(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if desirable_count < 1 or undesirable_count < 1:
        raise ValueError(
            f"KTO needs both kinds of answers, got {desirable_count} desirable "
            f"and {undesirable_count} undesirable"
        )
    return desirable_weight * desirable_count / (undesirable_weight * undesirable_count)
