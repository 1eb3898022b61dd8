"""One update of a reward model on ranked answers, and what it is worth on held-out ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.objectives.reward_model import bradley_terry, calibration_error
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.rungs.accumulate import Metrics, accumulate, take_step
from stepladder.rungs.reward_model.reliability import Reliability, reliability
from stepladder.types import TrainingSample


@dataclass(frozen=True, slots=True)
class Ranked:
    """Answers to one prompt and the pairs among them: `samples[better[p]]` beats `samples[worse[p]]`.

    A pair is K = 2; a ranking of K answers has K(K-1)/2 pairs, less those of equal rank. The samples share
    one `trajectory_id`, which keeps them in one micro-batch.
    """

    samples: tuple[TrainingSample, ...]
    better: tuple[int, ...]
    worse: tuple[int, ...]
    margins: tuple[float, ...]


def ranked_losses(
    scores: Tensor, rows: Sequence[Ranked], *, centring: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """([R] losses, one a row; [P] score differences; metrics) from the scores of all samples of `rows`.

    A row's loss is the mean of the Bradley-Terry losses of its pairs (objectives.reward_model), so that a
    prompt counts once, however many answers it has.
    """
    better: list[int] = []
    worse: list[int] = []
    margins: list[float] = []
    owner: list[int] = []
    start = 0
    for r, row in enumerate(rows):
        better += [start + i for i in row.better]
        worse += [start + i for i in row.worse]
        margins += row.margins
        owner += [r] * len(row.better)
        start += len(row.samples)
    margin = torch.tensor(margins, dtype=scores.dtype, device=scores.device)
    losses, metrics = bradley_terry(scores[better], scores[worse], margin=margin, centring=centring)
    index = torch.tensor(owner, device=scores.device)
    zeros = torch.zeros(len(rows), dtype=losses.dtype, device=scores.device)
    counts = zeros.index_add(0, index, torch.ones_like(losses.detach()))
    return zeros.index_add(0, index, losses) / counts, (scores[better] - scores[worse]).detach(), metrics


def cut_rows(rows: Sequence[Ranked], token_budget: int) -> Iterator[list[int]]:
    """Yield micro-batches of whole rows, of at most `token_budget` distinct tokens where a row fits that."""
    owner = [r for r, row in enumerate(rows) for _ in row.samples]
    samples = [sample for row in rows for sample in row.samples]
    for chosen in micro_batches(samples, token_budget):
        yield list(dict.fromkeys(owner[i] for i in chosen))


def _samples(rows: Sequence[Ranked], chosen: Sequence[int]) -> list[TrainingSample]:
    return [sample for r in chosen for sample in rows[r].samples]


def ranking_update(
    model: ScoredModel,
    optimizer: MasterOptimizer,
    rows: Sequence[Ranked],
    *,
    centring: float,
    learning_rate: float,
    token_budget: int,
) -> Metrics:
    """One optimiser step on the mean loss of `rows`, however they are cut into micro-batches."""

    def loss(chosen: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        scores, computed = model.scores_and_cost(_samples(rows, chosen))
        losses, _, metrics = ranked_losses(scores, [rows[r] for r in chosen], centring=centring)
        return losses.sum() / len(rows), metrics, computed

    metrics = accumulate(cut_rows(rows, token_budget), loss, count="pairs")
    return {**metrics, "grad_norm": take_step(optimizer, learning_rate)}


@torch.no_grad()
def ranking_validation(
    model: ScoredModel, rows: Sequence[Ranked], *, centring: float, token_budget: int
) -> tuple[Metrics, Reliability]:
    """Loss, accuracy, calibration and spread of the scores on `rows`; nothing is changed.

    Calibration is of the model's confidence σ(|r_w − r_l|) against whether the higher score was the better
    answer's.
    """
    losses, differences, scores = [], [], []
    for chosen in cut_rows(rows, token_budget):
        found = model.sequence_scores(_samples(rows, chosen))
        loss, difference, _ = ranked_losses(found, [rows[r] for r in chosen], centring=centring)
        losses.append(loss)
        differences.append(difference)
        scores.append(found)
    difference, score = torch.cat(differences), torch.cat(scores)
    confidence, right = torch.sigmoid(difference.abs()), difference > 0
    metrics = {
        "validation_loss": float(torch.cat(losses).double().mean()),
        "validation_accuracy": float(right.double().mean()),
        "validation_ece": float(calibration_error(confidence, right)),
        "validation_margin": float(difference.double().mean()),
        "validation_score_mean": float(score.double().mean()),
        "validation_score_std": float(score.double().std(correction=0)),
    }
    return metrics, reliability(confidence, right)


@torch.no_grad()
def score_statistics(model: ScoredModel, rows: Sequence[Ranked], *, token_budget: int) -> tuple[float, float]:
    """(mean, standard deviation) of the scores of all answers in `rows`: what normalisation subtracts."""
    found = [model.sequence_scores(_samples(rows, chosen)) for chosen in cut_rows(rows, token_budget)]
    scores = torch.cat(found).double()
    return float(scores.mean()), float(scores.std(correction=0))
