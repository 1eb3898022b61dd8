"""One update of a process reward model on labelled steps, and what it is worth on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.data.samples import StepSample
from stepladder.objectives.reward_model import calibration_error, step_cross_entropy
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.rungs.accumulate import Metrics, accumulate, take_step
from stepladder.rungs.reward_model.reliability import Reliability, reliability


def step_losses(
    model: ScoredModel, rows: Sequence[StepSample]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], int]:
    """([n] losses, [n] logits, [n] labels, metrics, tokens computed) of all steps of `rows`, in order."""
    logits, computed = model.at([row.sample for row in rows], [row.ends for row in rows])
    labels = torch.tensor([y for row in rows for y in row.labels], dtype=torch.float32, device=logits.device)
    mask = torch.ones(1, len(labels), dtype=torch.bool, device=logits.device)
    losses, metrics = step_cross_entropy(logits[None], labels[None], mask)
    return losses[0], logits, labels, metrics, computed


def step_update(
    model: ScoredModel,
    optimizer: MasterOptimizer,
    rows: Sequence[StepSample],
    *,
    learning_rate: float,
    token_budget: int,
) -> Metrics:
    """One optimiser step on the mean loss over all steps of `rows`, however they are cut."""
    steps = sum(len(row.ends) for row in rows)

    def loss(chosen: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        losses, _, _, metrics, computed = step_losses(model, [rows[i] for i in chosen])
        return losses.sum() / steps, metrics, computed

    metrics = accumulate(micro_batches([row.sample for row in rows], token_budget), loss)
    metrics["steps"] = metrics.pop("tokens")
    return {**metrics, "grad_norm": take_step(optimizer, learning_rate)}


@torch.no_grad()
def step_validation(
    model: ScoredModel, rows: Sequence[StepSample], *, token_budget: int
) -> tuple[Metrics, Reliability]:
    """Loss, accuracy (of right and of wrong steps too) and calibration on `rows`; nothing is changed.

    A step counts as right where its label is above ½. Calibration is of σ(z) against that.
    """
    parts = [
        step_losses(model, [rows[i] for i in chosen])[:3]
        for chosen in micro_batches([row.sample for row in rows], token_budget)
    ]
    losses, logits, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    right, said = labels > 0.5, logits > 0
    probabilities = torch.sigmoid(logits)
    metrics = {
        "validation_loss": float(losses.double().mean()),
        "validation_accuracy": float((said == right).double().mean()),
        "validation_ece": float(calibration_error(probabilities, right)),
    }
    for name, which in (("right", right), ("wrong", ~right)):
        if which.any():
            metrics[f"validation_accuracy_{name}"] = float((said == right)[which].double().mean())
    return metrics, reliability(probabilities, right)
