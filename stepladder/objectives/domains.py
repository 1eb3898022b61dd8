"""Keeping one task or domain from dominating a mixed batch: the three published forms, which differ.

    z-score of rewards      (R − mean_domain)/(std_domain + eps)              the plain idea
    AgentRL                 (A − mean_task)/std_task of token advantages      arXiv:2510.04206, after grouping
    AutoForge ERPO          (R − mean_prompt)/(std_environment + eps)         arXiv:2512.22857

Statistics are float64. Domains whose quantity is equal within float noise get exactly 0. NaN rewards are
left out and get 0."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._checks import require_float, require_same_shape
from .advantages import class_statistics, equal_within_float_noise, group_advantages


def domain_zscores(
    rewards: Float[Tensor, "n"], domain_index: Int[Tensor, "n"], *, ddof: int = 0, eps: float = 1e-8
) -> Float[Tensor, "n"]:
    """(R − mean)/(std + eps) over each domain's trajectories."""
    return group_advantages(rewards, domain_index, ddof=ddof, eps=eps)


def task_normalised_advantages(
    advantages: Float[Tensor, "n"], token_counts: Int[Tensor, "n"], task_index: Int[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Ã = (Â − μ)/σ with the mean and population deviation of all *token* advantages of the task (AgentRL).

    One advantage per trajectory, `token_counts` its trained tokens, which weigh it. A task whose trained
    tokens have one advantage within float noise gets 0; trajectories without tokens have no say in that."""
    require_same_shape(advantages=advantages, token_counts=token_counts, task_index=task_index)
    require_float(advantages=advantages)
    if (token_counts < 0).any():
        raise ValueError("token_counts hold a negative count")
    _, task = torch.unique(task_index, return_inverse=True)
    count = int(task.max()) + 1 if task.numel() else 0
    zeros = torch.zeros(count, dtype=torch.float64, device=advantages.device)
    weight, a = token_counts.double(), advantages.double()
    if not torch.isfinite(a).all():
        raise ValueError(
            "advantages hold NaN or infinity; unscorable trajectories have advantage 0 and 0 tokens"
        )
    total = zeros.index_add(0, task, weight).clamp(min=1)
    mean = zeros.index_add(0, task, weight * a) / total
    variance = zeros.index_add(0, task, weight * (a - mean[task]) ** 2) / total
    counted = torch.where(weight > 0, a, mean[task])
    high = (zeros - torch.inf).scatter_reduce(0, task, counted, "amax")
    low = (zeros + torch.inf).scatter_reduce(0, task, counted, "amin")
    flat = equal_within_float_noise(low, high, mean) | (variance == 0)
    deviation = torch.where(flat, torch.ones_like(variance), variance.sqrt())
    scaled = torch.where(flat[task], torch.zeros_like(a), (a - mean[task]) / deviation[task])
    return scaled.to(advantages.dtype)


def environment_scaled_advantages(
    rewards: Float[Tensor, "n"],
    group_index: Int[Tensor, "n"],
    environment_index: Int[Tensor, "n"],
    *,
    ddof: int = 0,
    eps: float = 1e-8,
) -> Float[Tensor, "n"]:
    """(R − mean of the prompt's group)/(std of the environment's rewards + eps) (AutoForge's ERPO).

    The prompts of a group belong to one environment; a group that lies in several raises."""
    require_same_shape(rewards=rewards, group_index=group_index, environment_index=environment_index)
    pairs = torch.unique(torch.stack([group_index, environment_index]), dim=1)
    groups, environments = torch.unique(pairs[0], return_counts=True)
    if (environments > 1).any():
        first = int((environments > 1).nonzero()[0])
        raise ValueError(
            f"group {int(groups[first])} lies in {int(environments[first])} environments; "
            "give every member of a group one environment_index"
        )
    centred = group_advantages(rewards, group_index, scale="none", ddof=ddof, eps=0.0).double()
    valid = ~torch.isnan(rewards)
    std = class_statistics(rewards, environment_index, valid, ddof=ddof)[2]
    scaled = torch.where(std > 0, centred / (std + eps), torch.zeros_like(centred))
    return scaled.to(rewards.dtype)
