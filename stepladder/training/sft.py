"""Supervised fine-tuning until the validation loss stops falling; the best epoch's weights are kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stepladder.config import SftSection
from stepladder.errors import DataError
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.training.interrupt import uninterrupted
from stepladder.training.step import sft_update, validation_loss
from stepladder.types import TrainingSample


@dataclass(slots=True)
class SftState:
    """Where the loop stands: everything a resumed run needs besides weights and moments."""

    epoch: int = 0
    position: int = 0  # samples of the epoch already used
    step: int = 0
    best_loss: float | None = None  # None: nothing validated yet
    best_epoch: int = -1
    best: dict[str, Tensor] = field(default_factory=dict)  # master weights of the best epoch

    def plain(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
        }


def run_sft(
    policy: Policy,
    optimizer: MasterOptimizer,
    samples: Sequence[TrainingSample],
    held_out: Sequence[TrainingSample],
    settings: SftSection,
    state: SftState,
    *,
    seed: int,
    on_step: Callable[[int, dict[str, float]], None],
    on_epoch: Callable[[SftState], None],
) -> SftState:
    """Train until `patience` epochs brought no better validation loss, then put the best weights back.

    `on_epoch` is where a checkpoint is taken. Raises DataError on an empty dataset.
    """
    if not samples:
        raise DataError("there is nothing to train on: the demonstrations are empty; give at least one")
    started = time.monotonic()
    if held_out and state.best_loss is None and state.step == 0:
        state.best_loss = validation_loss(policy, held_out, token_budget=settings.token_budget)
    while state.epoch < settings.epochs:
        order = list(range(len(samples)))
        random.Random(f"{seed}/{state.epoch}").shuffle(order)
        while state.position < len(order):
            chosen = [samples[i] for i in order[state.position : state.position + settings.batch_size]]
            with uninterrupted():
                began = time.monotonic()
                rate = warmup_then_constant(
                    state.step, peak=settings.learning_rate, warmup=settings.warmup_steps
                )
                metrics = sft_update(
                    policy, optimizer, chosen, learning_rate=rate, token_budget=settings.token_budget
                )
                state.position += settings.batch_size
                state.step += 1
                seconds = time.monotonic() - began
                metrics |= {"learning_rate": rate, "epoch": float(state.epoch), "seconds": seconds}
                on_step(state.step, metrics)
        began = time.monotonic()
        loss = validation_loss(policy, held_out, token_budget=settings.token_budget) if held_out else None
        with uninterrupted():
            state.epoch, state.position = state.epoch + 1, 0
            if loss is not None:
                _judge(state, optimizer, loss, settings.min_improvement)
                seconds = time.monotonic() - began
                on_step(
                    state.step,
                    {"validation_loss": loss, "epoch": float(state.epoch), "seconds": seconds},
                )
            on_epoch(state)
        if held_out and state.epoch - max(state.best_epoch, 0) >= settings.patience:
            break
        if settings.max_minutes is not None and time.monotonic() - started > settings.max_minutes * 60:
            break
    if state.best:
        optimizer.load({f"master/{name}": t for name, t in state.best.items()})
    return state


def _judge(state: SftState, optimizer: MasterOptimizer, loss: float, min_improvement: float) -> None:
    """Keep a copy of the weights if this epoch's validation loss is the best so far."""
    if state.best_loss is None or loss < state.best_loss - min_improvement:
        state.best_loss, state.best_epoch = loss, state.epoch
        state.best = {name: t.detach().clone() for name, t in optimizer.masters.items()}
