"""One optimiser step of preference optimisation: pairs (DPO and its relatives) or single answers (KTO).

Losses are means over the pairs (answers) of the whole step, KTO's reference point is one number for the
whole step, and metrics are computed once from all of its pairs: how the step is cut into micro-batches
changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepladder.data.batching import FORWARD_ONLY, micro_batches
from stepladder.errors import InvariantError
from stepladder.objectives import preference as losses
from stepladder.objectives.kl import kl_estimate
from stepladder.objectives.kto import kto, kto_reference_point
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.recipe.preference import PreferenceSection
from stepladder.rungs.accumulate import Metrics, accumulate, floats, take_step
from stepladder.types import TrainingSample

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion after its prompt. `reference[k]` = log p of its k-th trained token by the reference."""

    sample: TrainingSample
    reference: Tensor | None = None  # [trained tokens] in nats; None: the loss has no reference


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. Their samples have one trajectory_id and one group_id, that of the pair:
    so a micro-batch never parts them, and their prompt is computed once."""

    chosen: Answer
    rejected: Answer

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer with a thumb up or down, and its prompt with the answer of another one (KTO)."""

    answer: Answer
    mismatched: Answer
    desirable: bool

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (self.answer,)


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Sums over the trained tokens of n answers, [n] each: log p by policy and reference, tokens, k3.

    Without a reference, `reference` and `kl` are 0 and mean nothing.
    """

    logprob: Tensor
    reference: Tensor
    length: Tensor
    kl: Tensor
    has_reference: bool
    tokens_computed: int = 0

    @property
    def log_ratio(self) -> Tensor:
        return self.logprob - self.reference

    def pick(self, rows: Any) -> AnswerScores:
        """Some of the answers."""
        return AnswerScores(
            self.logprob[rows], self.reference[rows], self.length[rows], self.kl[rows], self.has_reference
        )

    @staticmethod
    def joined(parts: Sequence[AnswerScores]) -> AnswerScores:
        """The answers of all parts, without gradient."""

        def all_of(name: str) -> Tensor:
            return torch.cat([getattr(part, name).detach() for part in parts])

        computed = sum(part.tokens_computed for part in parts)
        return AnswerScores(
            all_of("logprob"),
            all_of("reference"),
            all_of("length"),
            all_of("kl"),
            parts[0].has_reference,
            computed,
        )


def score(policy: Policy, answers: Sequence[Answer]) -> AnswerScores:
    """The sums of `answers` under `policy`, which gradients flow through where autograd is on.

    `kl`: e^d - 1 - d over the tokens, d = current - reference,
    whose mean estimates KL(reference | policy) where the reference wrote the answers.
    """
    scores = policy.logprobs([a.sample for a in answers])
    logprob, length = losses.sequence_sums(scores.logprobs, scores.mask)
    reference, kl = torch.zeros_like(logprob), torch.zeros_like(logprob)
    has_reference = answers[0].reference is not None
    if has_reference:
        table = torch.zeros_like(scores.logprobs)
        # Rows of a boolean mask are taken in order, so the flat column falls into its places.
        table[scores.mask] = torch.cat([a.reference for a in answers if a.reference is not None]).to(table)
        reference, _ = losses.sequence_sums(table, scores.mask)
        kl = kl_estimate(table, scores.logprobs.detach(), scores.mask, estimator="k3").sum(-1)
    return AnswerScores(logprob, reference, length, kl, has_reference, scores.tokens_computed)


PairLoss = Callable[[AnswerScores, AnswerScores], LossAndMetrics]


def pair_loss(settings: PreferenceSection) -> PairLoss:
    """The recipe's loss as a function of the scores of chosen and rejected, one value a pair."""
    beta, smoothing, margin = settings.resolved_beta, settings.label_smoothing, settings.margin
    flipped = 0.1 if smoothing is None else smoothing
    per_token = settings.loss == "ipo" if settings.per_token is None else settings.per_token
    dpo = losses.length_normalised_dpo if per_token else losses.dpo
    # name: (function, by log-ratio to the reference?, by length?)
    table: dict[str, tuple[Callable[..., LossAndMetrics], bool, bool]] = {
        "dpo": (functools.partial(dpo, beta=beta), True, per_token),
        "cdpo": (functools.partial(dpo, beta=beta, label_smoothing=flipped), True, per_token),
        "robust": (
            functools.partial(losses.robust_dpo, beta=beta, label_smoothing=flipped),
            True,
            False,
        ),
        "ipo": (functools.partial(losses.ipo, tau=beta, average=per_token), True, True),
        "simpo": (
            functools.partial(
                losses.simpo, beta=beta, gamma=margin.gamma, gamma_beta_ratio=margin.gamma_beta_ratio
            ),
            False,
            True,
        ),
        "orpo": (functools.partial(losses.orpo, weight=beta), False, True),
    }
    function, by_ratio, by_length = table[settings.loss]
    weight = settings.sft_weight or 0.0

    def loss(chosen: AnswerScores, rejected: AnswerScores) -> LossAndMetrics:
        values = (chosen.log_ratio, rejected.log_ratio) if by_ratio else (chosen.logprob, rejected.logprob)
        lengths = (chosen.length, rejected.length) if by_length else ()
        each, metrics = function(*values, *lengths)
        if weight:  # RPO (arXiv:2404.19733): the likelihood of the chosen answer, a token
            nll = -chosen.logprob / chosen.length
            each, metrics["nll"] = each + weight * nll, nll.detach().mean()
        return each, metrics

    return loss


def preference_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    pairs: Sequence[Pair],
    loss: PairLoss,
    *,
    learning_rate: float,
    token_budget: int,
    before_step: Callable[[AnswerScores], None] | None = None,
) -> Metrics:
    """One update on `pairs`: the mean of `loss` over all of them.

    `before_step` sees the scores while the weights are still those that were scored; what it raises leaves
    them untouched.
    """
    parts: list[tuple[AnswerScores, AnswerScores]] = []

    def part(rows: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        sides = score_pairs(policy, [pairs[i] for i in rows])
        each, _ = loss(*sides)
        parts.append(sides)
        return losses.mean_over_step(each, len(pairs)), {}, sides[0].tokens_computed

    accumulate(cut(pairs, token_budget), part)
    chosen, rejected = (AnswerScores.joined(side) for side in zip(*parts, strict=True))
    norm = take_step(optimizer, learning_rate, _checks(before_step, chosen, rejected))
    return {**pair_metrics(chosen, rejected, loss), "grad_norm": norm}


def score_pairs(policy: Policy, pairs: Sequence[Pair]) -> tuple[AnswerScores, AnswerScores]:
    """(scores of the chosen, of the rejected); all tokens computed are counted with the chosen."""
    scores = score(policy, [answer for pair in pairs for answer in pair.answers])
    chosen = replace(scores.pick(slice(0, None, 2)), tokens_computed=scores.tokens_computed)
    return chosen, scores.pick(slice(1, None, 2))


def kto_update(
    policy: Policy,
    optimizer: MasterOptimizer,
    batch: Sequence[Judged],
    settings: PreferenceSection,
    *,
    learning_rate: float,
    token_budget: int,
    before_step: Callable[[AnswerScores], None] | None = None,
) -> Metrics:
    """One update by KTO: first the reference point of the whole step, then its answers."""
    point, computed = kto_point(policy, batch, token_budget)
    parts: list[AnswerScores] = []
    order: list[int] = []

    def part(rows: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
        scores = score(policy, [batch[i].answer for i in rows])
        each, _ = kto_loss(settings, scores, [batch[i] for i in rows], point)
        parts.append(scores)
        order.extend(rows)
        return losses.mean_over_step(each, len(batch)), {}, scores.tokens_computed

    accumulate(cut(batch, token_budget), part)
    scores = AnswerScores.joined(parts)
    norm = take_step(optimizer, learning_rate, _checks(before_step, scores))
    metrics = kto_metrics(settings, scores, [batch[i] for i in order], point)
    metrics["tokens_computed"] += computed
    return {**metrics, "grad_norm": norm}


@torch.no_grad()
def kto_point(policy: Policy, batch: Sequence[Judged], token_budget: int) -> tuple[Tensor, int]:
    """(z0 over the mismatched answers of the batch, tokens computed for it)."""
    answers = [judged.mismatched for judged in batch]
    samples = [answer.sample for answer in answers]
    batches = micro_batches(samples, FORWARD_ONLY * token_budget)
    parts = [score(policy, [answers[i] for i in rows]) for rows in batches]
    scores = AnswerScores.joined(parts)
    return kto_reference_point(scores.log_ratio), scores.tokens_computed


def kto_loss(
    settings: PreferenceSection, scores: AnswerScores, batch: Sequence[Judged], point: Tensor
) -> LossAndMetrics:
    """KTO of the scored answers of `batch` around the reference point of their step, one value an answer."""
    return kto(
        scores.log_ratio,
        torch.tensor([judged.desirable for judged in batch], device=scores.logprob.device),
        point,
        beta=settings.resolved_beta,
        desirable_weight=settings.weights.desirable_weight,
        undesirable_weight=settings.weights.undesirable_weight,
    )


def cut(items: Sequence[Pair | Judged], token_budget: int) -> list[list[int]]:
    """Micro-batches of whole items, as their indices."""
    owner = [i for i, item in enumerate(items) for _ in item.answers]
    samples = [answer.sample for item in items for answer in item.answers]
    batches = micro_batches(samples, token_budget)
    return [list(dict.fromkeys(owner[row] for row in rows)) for rows in batches]


# -- what is reported ---------------------------------------------------------------------------------------


def pair_metrics(chosen: AnswerScores, rejected: AnswerScores, loss: PairLoss) -> Metrics:
    """What users watch, over all pairs at once: means, never sums of micro-batches."""
    each, metrics = loss(chosen, rejected)
    out = {**floats(metrics), "loss": float(each.mean())}
    return out | _sides({"chosen": chosen, "rejected": rejected})


def kto_metrics(
    settings: PreferenceSection, scores: AnswerScores, batch: Sequence[Judged], point: Tensor
) -> Metrics:
    """The same for single answers; a kind that the batch has none of is left out."""
    each, metrics = kto_loss(settings, scores, batch, point)
    up = torch.tensor([judged.desirable for judged in batch], device=scores.logprob.device)
    sides = {"desirable": scores.pick(up), "undesirable": scores.pick(~up)}
    out = {**floats(metrics), "loss": float(each.mean())}
    for name, side in sides.items():
        if not len(side.logprob):
            del out[f"reward_{name}"]
    if all(len(side.logprob) for side in sides.values()):
        out["margin"] = out["reward_desirable"] - out["reward_undesirable"]
    counted = _sides({name: side for name, side in sides.items() if len(side.logprob)})
    return {**out, **counted, "tokens_computed": float(scores.tokens_computed)}


def _sides(sides: dict[str, AnswerScores]) -> Metrics:
    out: Metrics = {}
    for name, side in sides.items():
        out[f"logprob_{name}"] = float(side.logprob.mean())
        if side.has_reference:
            out[f"drift_{name}"] = float(side.log_ratio.mean())
    out["tokens"] = sum(float(side.length.sum()) for side in sides.values())
    if all(side.has_reference for side in sides.values()):
        out["kl"] = sum(float(side.kl.sum()) for side in sides.values()) / out["tokens"]
    out["tokens_computed"] = float(sum(side.tokens_computed for side in sides.values()))
    return out


# -- step 0 -------------------------------------------------------------------------------------------------


def _checks(
    before_step: Callable[[AnswerScores], None] | None, *scores: AnswerScores
) -> Callable[[], None] | None:
    def check_all() -> None:
        assert before_step is not None
        for side in scores:
            before_step(side)

    return None if before_step is None else check_all


def check_start(scores: AnswerScores, *, limit: float) -> None:
    """Before the first update the policy is the reference: every log-ratio is 0, DPO's loss ln 2.

    `limit`: nats a token that rounding may account for. Raises InvariantError with what to look at.
    """
    worst = float((scores.log_ratio.abs() / scores.length).max())
    if worst <= limit:  # NaN is not
        return
    raise InvariantError(
        "at the first update the policy is still the reference, so each implicit reward must be 0 and the "
        f"loss of dpo ln 2 = 0.6931; but an answer's log-probability is {worst:.3g} nats a token away from "
        f"the logged one (allowed: {limit:g}). Usual causes: weights that changed between the reference "
        "pass and the first step, dropout left on, a reference of another model or data set, or a mask that "
        "is shifted on one side"
    )
