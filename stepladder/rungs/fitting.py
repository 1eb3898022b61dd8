"""Fitting token sequences until the validation loss stops falling; the best epoch's weights are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from stepladder.errors import DataError
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.recipe.fitting import FittingSection
from stepladder.rungs.base import Rung
from stepladder.rungs.epochs import EpochState, Metrics, none_better, run_epochs, shuffled_batches
from stepladder.rungs.run import Run
from stepladder.rungs.supervised import sft_update, validation_loss
from stepladder.types import TrainingSample
from stepladder.workbench.memory import MemoryLimit


def run_sft(
    policy: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    held_out: Sequence[TrainingSample],
    settings: FittingSection,
    state: EpochState,
    *,
    seed: int,
    on_step: Callable[[int, dict[str, float]], None],
    on_epoch: Callable[[EpochState], None],
    memory: MemoryLimit | None = None,
) -> EpochState:
    """Fit `samples` in an order of each epoch's own, as `run_epochs` says.

    Raises DataError on an empty dataset.
    """
    if not samples:
        raise DataError("there is nothing to train on: the demonstrations are empty; give at least one")

    memory = memory or MemoryLimit()

    def update(rows: list[int], step: int) -> Metrics:
        rate = warmup_then_constant(step, peak=settings.learning_rate, warmup=settings.warmup_steps)
        batch = [samples[i] for i in rows]
        metrics = memory.fit(
            batch,
            settings.token_budget,
            optimizer,
            lambda tokens: sft_update(policy, optimizer, batch, learning_rate=rate, token_budget=tokens),
        )
        return {**metrics, "learning_rate": rate}

    def validate() -> Metrics:
        budget = memory.budget(settings.token_budget)
        return {"validation_loss": validation_loss(policy, held_out, token_budget=budget)}

    return run_epochs(
        optimizer,
        settings,
        state,
        batches=lambda epoch: shuffled_batches(len(samples), settings.batch_size, f"{seed}/{epoch}"),
        update=update,
        validate=validate if held_out else None,
        on_step=on_step,
        on_epoch=on_epoch,
    )


class FittingRung(Rung):
    """A rung that fits token sequences with `run_sft`, once or several times."""

    fitted: ClassVar[str] = "rung"  # what a fit is called in notes

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = EpochState()
        self.before = 0  # steps of the rung that lie before the present fit

    @property
    def settings(self) -> FittingSection:
        """The recipe's section of this rung."""
        section: FittingSection = self.section_of(self.run.recipe)
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
                on_epoch=lambda state: run.save_if_due(),
                memory=run.bench.memory,
            )
            self.progress.best = {}
        if said := none_better(self.progress, self.fitted):
            run.display.note(f"{self.name}: {said}")

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(self.name, self.before + step, metrics)

    def state(self) -> dict[str, Any]:
        return self.progress.checkpoint()

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self.progress.tensors()}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.load_optimizer(tensors, self.run.bench.policy.model, self.settings.max_grad_norm)
        self.progress = EpochState.of(state, tensors)
