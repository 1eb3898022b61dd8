"""Preference optimisation: epochs of DPO (or a relative, or KTO) against a reference that is logged once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from stepladder.data.files.split import fingerprint_of
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import DataError
from stepladder.objectives.kto import kto_balance
from stepladder.planning.needs import Needs, both_sides_limit
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant, warmup_then_linear
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.preference import PreferenceSection
from stepladder.rungs.base import Rung
from stepladder.rungs.epochs import EpochState, Metrics, none_better, run_epochs
from stepladder.rungs.preference.data import (
    JudgedData,
    PairData,
    judged_data,
    pair_data,
    preference_rows,
    with_reference,
)
from stepladder.rungs.preference.preview import first_answers
from stepladder.rungs.preference.reference_logprobs import ReferenceLog
from stepladder.rungs.preference.rows import check_rows
from stepladder.rungs.preference.update import (
    AnswerScores,
    check_start,
    cut,
    kto_metrics,
    kto_point,
    kto_update,
    pair_loss,
    pair_metrics,
    preference_update,
    score,
    score_pairs,
)
from stepladder.rungs.preview import Preview
from stepladder.rungs.run import Run
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench
from stepladder.workbench.memory import MemoryLimit
from stepladder.workbench.sources import Sources

log = logging.getLogger("stepladder")

EXACT_LIMIT, ROUNDED_LIMIT = 1e-3, 0.25  # nats a token between two passes of the same weights: fp32, bf16


def run_preference(
    policy: Policy,
    optimizer: MasterOptimizer,
    data: PairData | JudgedData,
    settings: PreferenceSection,
    state: EpochState,
    *,
    seed: int,
    on_step: Callable[[int, Metrics], None],
    on_epoch: Callable[[EpochState], None],
    memory: MemoryLimit | None = None,
) -> EpochState:
    """Train on `data`, whose reference log-probabilities were logged, as `run_epochs` says.

    Before the first update the policy is checked to be its reference. Raises DataError on an empty dataset,
    InvariantError where that check fails.
    """
    if not data.train:
        raise DataError("there is nothing to train on: no pair is left; give more, or lower validation")
    memory = memory or MemoryLimit()
    total = settings.epochs * len(data.batches(0, settings.batch_size, seed=seed))
    limit = EXACT_LIMIT if policy.dtype == torch.float32 else ROUNDED_LIMIT
    loss = pair_loss(settings) if isinstance(data, PairData) else None

    def first(scores: AnswerScores) -> None:
        check_start(scores, limit=limit)

    def update(rows: list[int], step: int) -> Metrics:
        rate = learning_rate(settings, step, total)
        check = first if step == 0 and settings.resolved_reference == "start" else None
        samples = [answer.sample for i in rows for answer in data.train[i].answers]

        def once(tokens: int) -> Metrics:
            options: dict[str, Any] = {"learning_rate": rate, "token_budget": tokens, "before_step": check}
            if isinstance(data, PairData):
                assert loss is not None
                return preference_update(policy, optimizer, [data.train[i] for i in rows], loss, **options)
            return kto_update(policy, optimizer, [data.train[i] for i in rows], settings, **options)

        metrics = memory.fit(samples, settings.token_budget, optimizer, once)
        return {**metrics, "learning_rate": rate}

    def validate() -> Metrics:
        return validation(policy, data, settings)

    return run_epochs(
        optimizer,
        settings,
        state,
        batches=lambda epoch: data.batches(epoch, settings.batch_size, seed=seed),
        update=update,
        validate=validate if data.held else None,
        on_step=on_step,
        on_epoch=on_epoch,
    )


def learning_rate(settings: PreferenceSection, step: int, total: int) -> float:
    """Of update `step` (from 0) of `total`. Raises ConfigError where a linear schedule has no room."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if settings.schedule == "linear":
        return warmup_then_linear(step, peak=peak, warmup=warmup, total=total)
    return warmup_then_constant(step, peak=peak, warmup=warmup)


@torch.no_grad()
def validation(policy: Policy, data: PairData | JudgedData, settings: PreferenceSection) -> Metrics:
    """Loss and margin of the held-out rows, of pairs their accuracy too; nothing is changed."""
    if isinstance(data, PairData):
        loss = pair_loss(settings)
        parts = [
            score_pairs(policy, [data.held[i] for i in rows])
            for rows in cut(data.held, settings.token_budget)
        ]
        chosen, rejected = (AnswerScores.joined(side) for side in zip(*parts, strict=True))
        metrics = pair_metrics(chosen, rejected, loss)
    else:
        point, _ = kto_point(policy, data.held, settings.token_budget)
        cuts = cut(data.held, settings.token_budget)
        scores = AnswerScores.joined([score(policy, [data.held[i].answer for i in rows]) for rows in cuts])
        metrics = kto_metrics(settings, scores, [data.held[i] for rows in cuts for i in rows], point)
    kept = ("loss", "accuracy", "margin")
    return {f"validation_{name}": metrics[name] for name in kept if name in metrics}


class PreferenceRung(Rung):
    """DPO and its relatives on pairs, KTO on single answers; see `run_preference`."""

    name: ClassVar[str] = "preference"

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        check_rows(recipe, cls.section_of(recipe), world, sources)

    @classmethod
    def needs(cls, section: PreferenceSection) -> Needs:
        made = max(1, section.pairs - section.validation) if section.pairs else 0
        return Needs(
            rows=section.batch_size,
            token_budget=section.token_budget,
            answers=2,
            steps=section.epochs * math.ceil(made / section.batch_size) if made else None,
            longest=both_sides_limit(section.limits.max_prompt_tokens, section.limits.max_completion_tokens),
            keeps_best=bool(section.validation),
        )

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview | None:
        return first_answers(bench, cls.section_of(bench.recipe), samples)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = EpochState()
        self.weights: str | None = None  # fingerprint of the policy that the rung began with

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def settings(self) -> PreferenceSection:
        settings: PreferenceSection = self.section_of(self.run.recipe)
        return settings

    def climb(self) -> None:
        run, settings, seed = self.run, self.settings, self.run.recipe.run.seed
        data = self._data(seed)
        with self.training(run.bench.policy.model, settings.max_grad_norm) as optimizer:
            run.display.start(f"preference ({settings.loss})", self._steps(data), self.step)
            run_preference(
                run.bench.policy,
                optimizer,
                data,
                settings,
                self.progress,
                seed=seed,
                on_step=lambda step, metrics: run.log("preference", step, metrics),
                on_epoch=lambda state: run.save_if_due(),
                memory=run.bench.memory,
            )
            self.progress.best = {}
        if said := none_better(self.progress):
            run.display.note(f"{self.name}: {said}")

    def _steps(self, data: PairData | JudgedData) -> int:
        return self.settings.epochs * len(data.batches(0, self.settings.batch_size, seed=0))

    def _data(self, seed: int) -> PairData | JudgedData:
        """Samples and, where the loss has one, the log-probabilities of the reference."""
        run, settings = self.run, self.settings
        said: list[str] = []
        sampled: dict[str, tuple[TrainingSample, ...]] = {}
        train, held = preference_rows(
            run.bench, settings, run.folder.path, seed=seed, say=said.append, found=sampled
        )
        data: PairData | JudgedData
        if settings.loss == "kto":
            data, tally = judged_data(run.bench, train, held, settings, sampled, seed=seed)
            warn_of_imbalance(data, settings)
        else:
            data, tally = pair_data(run.bench, train, held, settings, sampled)
        text = "; ".join((*said, tally.text))
        run.display.note(f"{self.name}: {text}")
        run.folder.log_data(self.name, {"text": text, "fingerprint": fingerprint_of([*train, *held])})
        learning_rate(settings, 0, self._steps(data))  # a schedule without room is refused before any work
        if settings.resolved_reference == "none":
            return data
        run.display.status("reference log-probabilities")
        reference = ReferenceLog(
            run.bench.policy,
            run.folder.path,
            base=settings.resolved_reference == "base",
            token_budget=settings.token_budget,
            weights=self.weights if self.step else None,
        )
        self.weights = reference.weights
        return with_reference(data, reference)

    def state(self) -> dict[str, Any]:
        return {**self.progress.checkpoint(), "weights": self.weights}

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self.progress.tensors()}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.load_optimizer(tensors, self.run.bench.policy.model, self.settings.max_grad_norm)
        self.progress, self.weights = EpochState.of(state, tensors), state["weights"]


def warn_of_imbalance(data: JudgedData, settings: PreferenceSection) -> None:
    """Say so where the weighted numbers of good and bad answers are far from what KTO was tuned for."""
    up = sum(judged.desirable for judged in data.train)
    down = len(data.train) - up
    if not up or not down:
        raise DataError(f"KTO needs good and bad answers; the data has {up} good and {down} bad ones")
    good, bad = settings.weights.desirable_weight, settings.weights.undesirable_weight
    ratio = kto_balance(up, down, desirable_weight=good, undesirable_weight=bad)
    if not 1.0 <= ratio <= 1.5:
        log.warning(
            "kto: %d good and %d bad answers, weighted %.2f to 1; the paper wants 1 to 1.5: try "
            "preference.kto.desirable_weight = %.3g",
            up,
            down,
            ratio,
            bad * down / up,
        )
