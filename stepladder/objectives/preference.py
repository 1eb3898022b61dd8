"""Preference losses on pairs: DPO and its relatives, SimPO, ORPO. (Single answers: `kto`.)

All start from sums over response tokens, one number per answer (`sequence_sums`): for a pair, chosen w and
rejected l,

    Δ_w = log π_θ(y_w) − log π_ref(y_w),   Δ_l likewise,   h = Δ_w − Δ_l,   margin = β·h

with σ the logistic function. Every function returns one loss per pair, in at least float32, to be averaged
over the pairs of the whole optimiser step with `mean_over_step`. Metrics are detached means over the batch
with their number under `pairs` (`reduce.merge_metrics(parts, count="pairs")`). −log σ(x) is softplus(−x),
which does not overflow.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from ._checks import (
    require_all_finite,
    require_bool,
    require_finite,
    require_finite_number,
    require_positive,
    require_same_shape,
    working,
    zero_where_masked,
)

PairLosses = tuple[Float[Tensor, "B"], dict[str, Tensor]]


def sequence_sums(
    logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    """(Σ_t m_t·lp_t, Σ_t m_t): log π(y|x) in nats and the length in tokens of each answer.

    An answer without tokens raises: its average is undefined and its preference empty.
    """
    require_same_shape(logprobs=logprobs, mask=mask)
    require_bool(mask)
    require_finite(mask, logprobs=logprobs.detach())
    lengths = mask.sum(dim=-1)
    empty = int((lengths == 0).sum())
    if empty:
        raise ValueError(
            f"{empty} answer(s) have no trained token; truncate each side to its own budget or drop them"
        )
    return zero_where_masked(mask, working(logprobs)).sum(dim=-1), lengths


def mean_over_step(losses: Float[Tensor, "B"], count: float) -> Float[Tensor, ""]:
    """Σ losses / count, with the number of pairs of the whole step: micro-batch results are added."""
    require_positive(count=count)
    return working(losses).sum() / count


def implicit_reward(log_ratio: Float[Tensor, "*B"], *, beta: float) -> Float[Tensor, "*B"]:
    """r̂ = β·(log π_θ(y) − log π_ref(y)), in reward units (arXiv:2305.18290, eq. 5 without the prompt's
    term)."""
    require_positive(beta=beta)
    return beta * working(log_ratio)


def dpo_margin(
    chosen_log_ratio: Float[Tensor, "*B"], rejected_log_ratio: Float[Tensor, "*B"], *, beta: float
) -> Float[Tensor, "*B"]:
    """m = β·(Δ_w − Δ_l), the difference of implicit rewards."""
    require_same_shape(chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    require_all_finite(
        chosen_log_ratio=chosen_log_ratio.detach(), rejected_log_ratio=rejected_log_ratio.detach()
    )
    return implicit_reward(chosen_log_ratio, beta=beta) - implicit_reward(rejected_log_ratio, beta=beta)


def dpo_gradient_weight(
    margin: Float[Tensor, "*B"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, "*B"]:
    """−∂L/∂h = β·((1−ε)·σ(−m) − ε·σ(m)): how hard the pair is pushed apart (arXiv:2305.18290, eq. 7)."""
    _require_smoothing(label_smoothing)
    push = (1 - label_smoothing) * torch.sigmoid(-margin) - label_smoothing * torch.sigmoid(margin)
    return implicit_reward(push, beta=beta)


def dpo(
    chosen_log_ratio: Float[Tensor, "B"],
    rejected_log_ratio: Float[Tensor, "B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLosses:
    """−(1−ε)·log σ(βh) − ε·log σ(−βh). DPO (arXiv:2305.18290); ε > 0 is conservative DPO.

    `label_smoothing` acts here as in OpenRLHF and open-instruct; TRL's plain sigmoid loss ignores it. At
    the start of training (π_θ = π_ref) every loss is ln 2."""
    _require_smoothing(label_smoothing)
    m = dpo_margin(chosen_log_ratio, rejected_log_ratio, beta=beta)
    losses = (1 - label_smoothing) * softplus(-m) + label_smoothing * softplus(m)
    return losses, _pair_metrics(beta * chosen_log_ratio, beta * rejected_log_ratio)


def robust_dpo(
    chosen_log_ratio: Float[Tensor, "B"],
    rejected_log_ratio: Float[Tensor, "B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PairLosses:
    """[−(1−ε)·log σ(βh) + ε·log σ(−βh)] / (1 − 2ε): unbiased when a share ε of labels is flipped
    (arXiv:2403.00409)."""
    _require_smoothing(label_smoothing)
    m = dpo_margin(chosen_log_ratio, rejected_log_ratio, beta=beta)
    losses = (1 - label_smoothing) * softplus(-m) - label_smoothing * softplus(m)
    metrics = _pair_metrics(beta * chosen_log_ratio, beta * rejected_log_ratio)
    return losses / (1 - 2 * label_smoothing), metrics


def hinge_dpo(
    chosen_log_ratio: Float[Tensor, "B"], rejected_log_ratio: Float[Tensor, "B"], *, beta: float = 0.1
) -> PairLosses:
    """max(0, 1 − βh) (SLiC, arXiv:2305.10425, on DPO's margin)."""
    m = dpo_margin(chosen_log_ratio, rejected_log_ratio, beta=beta)
    return torch.relu(1 - m), _pair_metrics(beta * chosen_log_ratio, beta * rejected_log_ratio)


def ipo(
    chosen_log_ratio: Float[Tensor, "B"],
    rejected_log_ratio: Float[Tensor, "B"],
    chosen_lengths: Int[Tensor, "B"],
    rejected_lengths: Int[Tensor, "B"],
    *,
    tau: float = 0.1,
    average: bool = True,
) -> PairLosses:
    """(h̄ − 1/(2τ))² (arXiv:2310.12036), h̄ from log-ratios per token; `average=False` takes their sums.

    The paper writes sums; TRL and HALOs average and report the authors' agreement, OpenRLHF sums.
    """
    require_positive(tau=tau)
    require_all_finite(
        chosen_log_ratio=chosen_log_ratio.detach(), rejected_log_ratio=rejected_log_ratio.detach()
    )
    chosen, rejected = working(chosen_log_ratio), working(rejected_log_ratio)
    if average:
        chosen = _per_token(chosen, chosen_lengths)
        rejected = _per_token(rejected, rejected_lengths)
    require_same_shape(chosen_log_ratio=chosen, rejected_log_ratio=rejected)
    return (chosen - rejected - 1 / (2 * tau)) ** 2, _pair_metrics(tau * chosen, tau * rejected)


def length_normalised_dpo(
    chosen_log_ratio: Float[Tensor, "B"],
    rejected_log_ratio: Float[Tensor, "B"],
    chosen_lengths: Int[Tensor, "B"],
    rejected_lengths: Int[Tensor, "B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLosses:
    """DPO on log-ratios per token: −log σ(β(Δ_w/|y_w| − Δ_l/|y_l|)) (Tülu 3, arXiv:2411.15124; there β 5)."""
    return dpo(
        _per_token(chosen_log_ratio, chosen_lengths),
        _per_token(rejected_log_ratio, rejected_lengths),
        beta=beta,
        label_smoothing=label_smoothing,
    )


def simpo(
    chosen_logprob: Float[Tensor, "B"],
    rejected_logprob: Float[Tensor, "B"],
    chosen_lengths: Int[Tensor, "B"],
    rejected_lengths: Int[Tensor, "B"],
    *,
    beta: float = 2.0,
    gamma: float | None = None,
    gamma_beta_ratio: float | None = None,
) -> PairLosses:
    """−log σ(β·(lp_w/|y_w| − lp_l/|y_l|) − γ), no reference (arXiv:2405.14734).

    Takes sums of log-probabilities (`sequence_sums`), averages them itself. Give the target margin either
    as the paper's absolute `gamma` or, as its code does, as `gamma_beta_ratio` = γ/β; exactly one."""
    gamma = _simpo_gamma(beta, gamma, gamma_beta_ratio)
    chosen = _per_token(chosen_logprob, chosen_lengths)
    rejected = _per_token(rejected_logprob, rejected_lengths)
    m = dpo_margin(chosen, rejected, beta=beta) - gamma
    return softplus(-m), _pair_metrics(beta * chosen, beta * rejected)


def simpo_gradient_weight(
    chosen_logprob: Float[Tensor, "B"],
    rejected_logprob: Float[Tensor, "B"],
    chosen_lengths: Int[Tensor, "B"],
    rejected_lengths: Int[Tensor, "B"],
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Float[Tensor, "B"]:
    """β·σ(γ − β(avg_w − avg_l)): the weight of the pair, for its averaged log-probabilities."""
    chosen = _per_token(chosen_logprob, chosen_lengths)
    rejected = _per_token(rejected_logprob, rejected_lengths)
    return dpo_gradient_weight(dpo_margin(chosen, rejected, beta=beta) - gamma, beta=beta)


def orpo(
    chosen_logprob: Float[Tensor, "B"],
    rejected_logprob: Float[Tensor, "B"],
    chosen_lengths: Int[Tensor, "B"],
    rejected_lengths: Int[Tensor, "B"],
    *,
    weight: float = 0.1,
) -> PairLosses:
    """−lp_w/|y_w| + λ·(−log σ(log odds_w − log odds_l)), odds = P/(1−P), P = exp(lp/|y|) (arXiv:2403.07691).

    Takes sums of log-probabilities of the answers. The likelihood term is over the chosen answer's tokens
    (TRL's includes the prompt's). Averages are held below −1e-6, where 1 − P would vanish."""
    require_positive(weight=weight)
    chosen = _per_token(chosen_logprob, chosen_lengths)
    rejected = _per_token(rejected_logprob, rejected_lengths)
    require_same_shape(chosen_logprob=chosen, rejected_logprob=rejected)
    require_all_finite(chosen_logprob=chosen.detach(), rejected_logprob=rejected.detach())
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    metrics = _pair_metrics(weight * chosen, weight * rejected)
    metrics["log_odds_ratio"] = log_odds.detach().mean()
    metrics["nll"] = -chosen.detach().mean()
    return -chosen + weight * softplus(-log_odds), metrics


def _log_odds(average: Tensor) -> Tensor:
    bounded = average.clamp(max=-1e-6)
    return bounded - torch.log(-torch.expm1(bounded))


def _per_token(values: Tensor, lengths: Tensor) -> Tensor:
    require_same_shape(values=values, lengths=lengths)
    if (lengths < 1).any():
        raise ValueError(
            "lengths hold a value below 1; an answer without tokens has no average, drop the pair"
        )
    total = working(values)
    return total / lengths.to(total.dtype)


def _simpo_gamma(beta: float, gamma: float | None, ratio: float | None) -> float:
    require_positive(beta=beta)
    if (gamma is None) == (ratio is None):
        raise ValueError(
            f"give exactly one of gamma (absolute) and gamma_beta_ratio, got {gamma} and {ratio}; "
            "for example gamma=1.0, or gamma_beta_ratio=0.5"
        )
    chosen = gamma if gamma is not None else beta * (ratio or 0.0)
    require_finite_number(gamma=chosen)
    return chosen


def _require_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}; for example 0.1")


def _pair_metrics(chosen_reward: Tensor, rejected_reward: Tensor) -> dict[str, Tensor]:
    chosen, rejected = working(chosen_reward.detach()), working(rejected_reward.detach())
    if chosen.numel() == 0:
        raise ValueError("the batch holds no pair; pass at least one")
    return {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "margin": (chosen - rejected).mean(),
        # A tie is no win: at step 0, where both are 0, accuracy is 0.
        "accuracy": (chosen > rejected).to(chosen.dtype).mean(),
        "pairs": torch.tensor(chosen.numel(), device=chosen.device),
    }
