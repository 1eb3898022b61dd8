"""Mutual information of prompt and response, from the policy's own log-probabilities of each under each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stepladder.data.batching import micro_batches
from stepladder.diagnostics.dependence import Ids, responses
from stepladder.diagnostics.signals import template_collapse
from stepladder.policies.policy import Policy
from stepladder.types import Group, TrainingSample


@torch.no_grad()
def prompt_information(
    policy: Policy,
    groups: Sequence[Group],
    *,
    temperature: float,
    prompts: int = 6,
    each: int = 2,
    tokens: int = 64,
    token_budget: int = 4096,
) -> float:
    """I(prompt; response) over its bound ln N, over open groups; NaN where fewer than three prompts differ.

    The first `prompts` prompts, `each` responses of each, their first `tokens` tokens: every response is
    scored under every prompt. 1: each names its prompt for certain; 0: they do not depend on it (few samples
    give slightly negative values, which are returned as 0). RAGEN-2 (arXiv:2604.06268).
    """
    if any(sample.images for g in groups for t in g.trajectories for sample in t.samples):
        return math.nan  # a prompt with images is more than its ids
    table = list(responses(groups).items())[:prompts]
    if len(table) < 3:
        return math.nan
    said = [(own, text[:tokens]) for own, (_, texts) in enumerate(table) for text in texts[:each]]
    samples = [_under(prompt, text) for _, text in said for prompt, _ in table]
    sums = torch.zeros(len(samples), dtype=torch.float64)
    for rows in micro_batches(samples, token_budget):
        scores = policy.logprobs([samples[i] for i in rows], temperature=temperature)
        sums[rows] = scores.logprobs.sum(1).double().cpu()
    matrix = sums.reshape(len(said), len(table))
    found = template_collapse(matrix, torch.tensor([own for own, _ in said]))
    return max(0.0, float(found.mutual_information / found.bound))


def _under(prompt: Ids, text: Ids) -> TrainingSample:
    ids = (*prompt, *text)
    mask = tuple(i >= len(prompt) for i in range(len(ids)))
    turns = tuple(0 if m else -1 for m in mask)
    name = str(hash((prompt, text)))
    return TrainingSample(ids, mask, (0.0,) * len(ids), name, turns, name)
