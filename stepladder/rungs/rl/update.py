"""One optimiser step of RL, and the proof that the sampler was the model being trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stepladder.algorithms import Algorithm
from stepladder.data.batching import micro_batches
from stepladder.errors import ConfigError, InvariantError
from stepladder.objectives.corrections import Correction, correction_weights, mismatch_metrics
from stepladder.objectives.kl import kl_estimate
from stepladder.objectives.policy_gradient import SURROGATES
from stepladder.objectives.reduce import aggregate, step_denominators
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy, Scores
from stepladder.rungs.accumulate import Metrics, PartLoss, accumulate, floats, take_step
from stepladder.types import TrainingSample


@dataclass(slots=True)
class RlBatch:
    """What one batch of rollouts became. One row per sample; a split trajectory has several rows.

    advantages [n] or, one for each token, [n, T] float32; group_index [n]. trajectory_index [n]: which rows
    are one sequence, a trajectory or, where the algorithm's row says so, a turn. `proximal` is
    filled by the first update. With a critic: its `values` and the `returns` it learns, [n, T].
    `measured`: what crediting found out, for the log.
    """

    samples: list[TrainingSample]
    advantages: Tensor
    trajectory_index: Tensor
    group_index: Tensor
    proximal: dict[int, Tensor] = field(default_factory=dict)
    reference: dict[int, Tensor] = field(default_factory=dict)
    values: Tensor | None = None
    returns: Tensor | None = None
    measured: Metrics = field(default_factory=dict)


ClipAgainst = Literal["proximal", "behaviour"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRules:
    """The numbers of an update: the same for all its micro-batches.

    `clip_against`: whose log-probabilities the surrogate's ratio is taken against; "behaviour" contains the
    correction already. `constant` is the length that the aggregation "constant" divides by; `loss` the
    user's own surrogate, called with (logprobs, proximal, advantages, mask) and those numbers of the row
    that it names.
    """

    row: Algorithm
    temperature: float = 1.0
    token_budget: int = 4096
    correction: Correction = "none"
    clip_against: ClipAgainst = "proximal"
    constant: float | None = None
    entropy_coefficient: float = 0.0
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] | None = None

    @property
    def kl_in_loss(self) -> bool:
        return self.row.kl_in == "loss" and self.row.kl_coefficient > 0


def rl_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    batch: RlBatch,
    rules: UpdateRules,
    *,
    learning_rate: float,
    reference: Policy | None = None,
    also: PartLoss | None = None,
    replay: Callable[[], Metrics] | None = None,
    before_step: Callable[[Metrics], None] | None = None,
) -> Metrics:
    """One update of `batch`. `replay` adds gradients of its own to a step that is taken.

    Trajectories without advantage are skipped where nothing else (a KL term, an entropy bonus, `also`)
    gives them a gradient; they stay in the denominators. At the first update of a batch the proximal
    log-probabilities are the current ones. `before_step` sees the metrics while the weights are still those
    that were measured; what it raises leaves them untouched. Returns metrics with `updated` 0.0 when no
    sample had a signal: then no step was taken. Raises ValueError for a KL term in the loss without a
    `reference`.
    """
    if rules.kl_in_loss and reference is None:
        raise ValueError(
            f"{rules.row.name!r} has a KL term in its loss (coefficient {rules.row.kl_coefficient:g}); give "
            "the reference policy, or a row with kl_coefficient=0"
        )
    everything = rules.kl_in_loss or rules.entropy_coefficient > 0 or also is not None
    live = list(range(len(batch.samples))) if everything else with_signal(batch)
    if not live:
        measured = _measured(policy, batch.samples, rules)
        if before_step is not None:
            before_step(measured)
        return {**measured, "updated": 0.0, "grad_norm": 0.0, "loss": 0.0}
    denominators = step_denominators(
        torch.tensor([s.num_trained for s in batch.samples]),
        mode=rules.row.aggregation,
        trajectory_index=batch.trajectory_index,
        group_index=batch.group_index,
        constant=rules.constant,
    )

    def part(chunk: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        rows = [live[k] for k in chunk]
        loss, metrics, tokens = micro_batch_loss(policy, batch, rows, denominators[rows], rules, reference)
        if also is not None:
            more, extra, _ = also(rows)
            loss, metrics = loss + more, metrics | extra
        return loss, metrics, tokens

    # micro_batches keeps the rows of a split trajectory in one micro-batch (and they are all live or none).
    # So sums over a trajectory are whole here, and the surrogate needs none from elsewhere.
    metrics = accumulate(micro_batches([batch.samples[i] for i in live], rules.token_budget), part)
    shown = {name: value for name, value in metrics.items() if name not in ("loss", "tokens_computed")}

    def check() -> None:
        if before_step is not None:
            before_step(shown)
        if replay is not None:
            metrics.update(replay())

    norm = take_step(optimizer, learning_rate, check)
    return {**metrics, "grad_norm": norm, "updated": 1.0}


def with_signal(batch: RlBatch) -> list[int]:
    """Rows of trajectories with an advantage other than 0 on some token."""
    some = batch.advantages.reshape(len(batch.samples), -1).ne(0).any(dim=1)
    live = set(batch.trajectory_index[some].tolist())
    return [i for i, trajectory in enumerate(batch.trajectory_index.tolist()) if trajectory in live]


def micro_batch_loss(
    policy: Policy,
    batch: RlBatch,
    rows: list[int],
    denominators: Tensor,
    rules: UpdateRules,
    reference: Policy | None,
) -> tuple[Tensor, dict[str, Tensor], int]:
    """(loss, metrics, tokens computed) of some rows: surrogate × correction + KL - entropy, over D_i."""
    samples = [batch.samples[i] for i in rows]
    bonus = rules.entropy_coefficient
    scores = policy.logprobs(samples, temperature=rules.temperature, entropy_gradient=bonus > 0)
    behaviour = behaviour_logprobs(samples, scores)
    proximal = _proximal(batch, rows, scores)
    advantages = batch.advantages[rows].to(scores.logprobs.device)
    if advantages.dim() == 2:
        advantages = advantages[:, : scores.mask.shape[1]]
    index = batch.trajectory_index[rows].to(scores.logprobs.device)
    against = proximal if rules.clip_against == "proximal" else behaviour
    losses, metrics = _surrogate(rules, scores, against, advantages, index)
    low = 0.5 if rules.correction == "token_mask" else None  # a token that hardly weighs needs no lower cap
    weights, weight_metrics = correction_weights(
        proximal, behaviour, scores.mask, correction=rules.correction, low=low, high=2.0
    )
    metrics |= weight_metrics | mismatch_metrics(proximal, behaviour, scores.mask)
    metrics |= _distances(scores, behaviour)
    losses = losses * weights
    if rules.kl_in_loss and reference is not None:
        anchor = _reference(batch, rows, reference, rules.temperature)
        kl = kl_estimate(scores.logprobs, anchor, scores.mask, estimator=rules.row.kl_estimator)
        losses = losses + rules.row.kl_coefficient * kl
        metrics["kl"] = (kl.detach() * scores.mask).sum() / scores.mask.sum().clamp(min=1)
    if bonus > 0:
        losses = losses - bonus * scores.entropy * scores.mask
    return aggregate(losses, scores.mask, denominators.to(losses.device)), metrics, scores.tokens_computed


def _surrogate(
    rules: UpdateRules, scores: Scores, proximal: Tensor, advantages: Tensor, trajectory_index: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    row = rules.row
    numbers = {
        "clip_low": row.clip_low,
        "clip_high": row.clip_high,
        "ratio_level": row.ratio_level,
        "trajectory_index": trajectory_index,
        "dual_clip": row.dual_clip,
        "absolute": row.clip_absolute,
    }
    if rules.loss is None:
        return SURROGATES[row.surrogate](scores.logprobs, proximal, advantages, scores.mask, **numbers)  # type: ignore[arg-type]
    taken = inspect.signature(rules.loss).parameters
    chosen = {name: number for name, number in numbers.items() if name in taken}
    losses, metrics = rules.loss(scores.logprobs, proximal, advantages, scores.mask, **chosen)
    if losses.shape != scores.mask.shape:
        raise ConfigError(
            f"rl.loss returned losses of shape {tuple(losses.shape)}; return one for each token, "
            f"{tuple(scores.mask.shape)}, and a dictionary of metrics"
        )
    shown = {name: torch.as_tensor(value).detach() for name, value in metrics.items()}
    return losses * scores.mask, {**shown, "tokens": scores.mask.sum()}


@torch.no_grad()
def reference_kl(batch: RlBatch, reference: Policy, *, temperature: float, token_budget: int) -> Tensor:
    """k1 = behaviour - reference [n, T] in nats, of every trained token: the KL term of a reward."""
    width = max(len(s.token_ids) for s in batch.samples)
    out = torch.zeros(len(batch.samples), width)
    for rows in micro_batches(batch.samples, token_budget):
        anchor = _reference(batch, rows, reference, temperature).cpu()
        for b, i in enumerate(rows):
            sample = batch.samples[i]
            n = len(sample.token_ids)
            behaviour = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64).float()
            out[i, :n] = (behaviour - anchor[b, :n]) * torch.tensor(sample.mask)
    return out


def check_on_policy(
    metrics: Metrics,
    *,
    exact_limit: float | None,
    mean_limit: float,
    cause: Callable[[], str] | None = None,
) -> None:
    """Stop when the model being trained is not the one that sampled.

    `exact_limit` bounds every trained token's |log ratio| (engine and trainer both fp32), `mean_limit`
    its mean (an engine in another precision). Raises InvariantError with what `cause` finds, or, without
    one, with what to look at.
    """
    worst, mean = metrics.get("log_ratio_abs_max", 0.0), metrics.get("log_ratio_abs", 0.0)
    within = worst <= exact_limit if exact_limit is not None else mean <= mean_limit
    if within:  # NaN is not
        return
    found = (
        "Usual causes: a weight sync that did not arrive, dropout left on, a temperature applied on one side "
        "only, or a mask that is shifted"
    )
    if cause is not None:
        found = cause()
    allowed = f"{exact_limit:g} for each" if exact_limit is not None else f"{mean_limit:g} on average"
    raise InvariantError(
        "the log-probabilities stored when the tokens were sampled are not those of the model being "
        f"trained: mean difference {mean:.3g} nats a token, largest {worst:.3g} (allowed: {allowed}). "
        f"On-policy they are equal. {found}"
    )


def behaviour_logprobs(samples: Sequence[TrainingSample], scores: Scores) -> Tensor:
    """The engine's log-probabilities as [B, T], 0 where the mask is False."""
    out = torch.zeros(scores.logprobs.shape)
    for b, sample in enumerate(samples):
        out[b, : len(sample.token_ids)] = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64).float()
    return out.to(scores.logprobs.device)


@torch.no_grad()
def _measured(policy: Policy, samples: Sequence[TrainingSample], rules: UpdateRules) -> Metrics:
    """How far sampler and policy are apart, on a first part of a batch that gives no gradient.

    Without it an engine on the wrong weights, which earns nothing, would never be found.
    """
    if not samples:
        return {}
    chosen = [samples[i] for i in micro_batches(samples, rules.token_budget)[0]]
    scores = policy.logprobs(chosen, temperature=rules.temperature)
    return floats(_distances(scores, behaviour_logprobs(chosen, scores)))


def _proximal(batch: RlBatch, rows: list[int], scores: Scores) -> Tensor:
    current = scores.logprobs.detach()
    out = torch.zeros_like(current)
    for b, i in enumerate(rows):
        width = len(batch.samples[i].token_ids)
        known = batch.proximal.setdefault(i, current[b, :width].clone())
        out[b, :width] = known
    return out


@torch.no_grad()
def _reference(batch: RlBatch, rows: list[int], reference: Policy, temperature: float) -> Tensor:
    missing = [i for i in rows if i not in batch.reference]
    if missing:
        scores = reference.logprobs([batch.samples[i] for i in missing], temperature=temperature)
        for b, i in enumerate(missing):
            batch.reference[i] = scores.logprobs[b, : len(batch.samples[i].token_ids)]
    out = torch.zeros(len(rows), max(len(batch.samples[i].token_ids) for i in rows), device=reference.device)
    for b, i in enumerate(rows):
        out[b, : len(batch.reference[i])] = batch.reference[i]
    return out


def _distances(scores: Scores, behaviour: Tensor) -> dict[str, Tensor]:
    difference = (scores.logprobs.detach() - behaviour).abs() * scores.mask
    count = scores.mask.sum().clamp(min=1)
    return {
        "log_ratio_abs": difference.sum() / count,
        "log_ratio_abs_max": difference.max(),
        "entropy": (scores.entropy.detach() * scores.mask).sum() / count,
    }
