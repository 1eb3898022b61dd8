"""Supervised fine-tuning until the validation loss stops falling; the best epoch's weights are kept."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from stepladder.errors import DataError
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.sections.fitting import FittingSection
from stepladder.training.demonstrations import sft_data
from stepladder.training.interrupt import uninterrupted
from stepladder.training.rung import Run, Rung
from stepladder.training.step import sft_update, validation_loss
from stepladder.types import TrainingSample

CHECKPOINT_SECONDS = 60.0  # an epoch on a few demonstrations is over sooner than its checkpoint


@dataclass(slots=True)
class SftState:
    """Where the loop stands: everything a resumed run needs besides weights and moments."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None  # None: nothing validated yet
    best_epoch: int = 0  # 0: the model that SFT began with
    best_step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)  # master weights of the best epoch

    def plain(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
            "best_step": self.best_step,
        }

    @property
    def at_best(self) -> bool:
        """Are the present weights the best ones?"""
        return bool(self.best) and self.best_step == self.step


def run_sft(
    policy: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    held_out: Sequence[TrainingSample],
    settings: FittingSection,
    state: SftState,
    *,
    seed: int,
    on_step: Callable[[int, dict[str, float]], None],
    on_epoch: Callable[[SftState], None],
) -> SftState:
    """Train until `patience` epochs brought no better validation loss, then put the best weights back.

    The best weights are those SFT began with where no epoch made them better. `state` may lie inside an
    epoch (a Ctrl-C fell there): its remaining batches come first. `on_epoch` is where a checkpoint is taken.
    Raises DataError on an empty dataset.
    """
    if not samples:
        raise DataError("there is nothing to train on: the demonstrations are empty; give at least one")
    if held_out and state.best_loss is None:
        _validate(policy, optimizer, held_out, settings, state)
    per_epoch = math.ceil(len(samples) / settings.batch_size)
    while state.epoch < settings.epochs and not _finished(settings, state, bool(held_out)):
        order = list(range(len(samples)))
        random.Random(f"{seed}/{state.epoch}").shuffle(order)
        for batch in range(state.step - state.epoch * per_epoch, per_epoch):
            chosen = order[batch * settings.batch_size : (batch + 1) * settings.batch_size]
            rate = warmup_then_constant(state.step, peak=settings.learning_rate, warmup=settings.warmup_steps)
            with uninterrupted():
                began = time.monotonic()
                metrics = sft_update(
                    policy,
                    optimizer,
                    [samples[i] for i in chosen],
                    learning_rate=rate,
                    token_budget=settings.token_budget,
                )
                seconds = time.monotonic() - began
                state.step += 1
                state.seconds += seconds
                metrics |= {"learning_rate": rate, "epoch": float(state.epoch), "seconds": seconds}
                on_step(state.step, metrics)
        with uninterrupted():
            state.epoch += 1
            if held_out:
                began = time.monotonic()
                loss = _validate(policy, optimizer, held_out, settings, state)
                seconds = time.monotonic() - began
                state.seconds += seconds
                metrics = {"validation_loss": loss, "epoch": float(state.epoch), "seconds": seconds}
                on_step(state.step, metrics)
            on_epoch(state)
    if state.best:
        optimizer.load({f"master/{name}": t for name, t in state.best.items()})
    return state


def _validate(
    policy: Policy,
    optimizer: MasterOptimizer,
    held_out: Sequence[TrainingSample],
    settings: FittingSection,
    state: SftState,
) -> float:
    """The validation loss; the weights are kept where it is the best so far, by `min_improvement`."""
    loss = validation_loss(policy, held_out, token_budget=settings.token_budget)
    if state.best_loss is None or loss < state.best_loss - settings.min_improvement:
        state.best_loss, state.best_epoch, state.best_step = loss, state.epoch, state.step
        state.best = {name: t.detach().clone() for name, t in optimizer.masters.items()}
    return loss


def _finished(settings: FittingSection, state: SftState, validated: bool) -> bool:
    """Asked before an epoch, so that a run killed after its last epoch does not begin another."""
    if settings.max_minutes is not None and state.seconds > settings.max_minutes * 60:
        return True
    return validated and state.epoch - state.best_epoch >= settings.patience


class FittingRung(Rung):
    """A rung that fits token sequences with `run_sft`, once or several times."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = SftState()
        self.before = 0  # steps of the rung that lie before the present fit

    @property
    def settings(self) -> FittingSection:
        """The recipe's section of this rung."""
        section = getattr(self.run.recipe, self.name)
        assert isinstance(section, FittingSection)
        return section

    @property
    def step(self) -> int:
        return self.before + self.progress.step

    def fit(self, samples: Sequence[TrainingSample], validation: Sequence[TrainingSample], seed: int) -> None:
        """From where `progress` stands to the end of this fit."""
        run, settings = self.run, self.settings
        with self.training(run.bench.policy.model, settings.max_grad_norm) as optimizer:
            per_epoch = math.ceil(len(samples) / settings.batch_size)
            run.display.start(self.name, self.before + settings.epochs * per_epoch, self.step)
            run_sft(
                run.bench.policy,
                optimizer,
                samples,
                validation,
                settings,
                self.progress,
                seed=seed,
                on_step=self._on_step,
                on_epoch=lambda state: run.save_if_due(CHECKPOINT_SECONDS),
            )
            self.progress.best = {}

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(self.name, self.before + step, metrics)

    def state(self) -> dict[str, Any]:
        return {**self.progress.plain(), "at_best": self.progress.at_best}

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        if not self.progress.at_best:  # else the masters are the best weights
            tensors |= {f"best/{name}": t for name, t in self.progress.best.items()}
        return tensors

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.progress = SftState(**{k: v for k, v in state.items() if k != "at_best"})
        self.load_optimizer(tensors, self.run.bench.policy.model, self.settings.max_grad_norm)
        kept = "master/" if state["at_best"] else "best/"
        self.progress.best = {k.removeprefix(kept): t for k, t in tensors.items() if k.startswith(kept)}


class SftRung(FittingRung):
    """Supervised fine-tuning on a file or on demonstrations of the environment."""

    name: ClassVar[str] = "sft"

    def climb(self) -> None:
        run, settings = self.run, self.run.recipe.sft
        assert settings is not None
        data = sft_data(run.bench, settings, seed=run.recipe.run.seed)
        run.folder.log_data(self.name, data.facts())
        run.display.note(f"{self.name}: {data.text}")
        self.fit(data.train, data.held, run.recipe.run.seed)
