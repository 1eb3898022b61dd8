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
    seconds: float = 0.0
    best_loss: float | None = None  # None: nothing validated yet
    best_epoch: int = 0  # 0: the model that SFT began with
    best: dict[str, Tensor] = field(default_factory=dict)  # master weights of the best epoch

    def plain(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "seconds": self.seconds,
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

    The best weights are those SFT began with where no epoch made them better. `state` may lie inside an
    epoch (a Ctrl-C fell there): its remaining batches come first. `on_epoch` is where a checkpoint is taken.
    Raises DataError on an empty dataset.
    """
    if not samples:
        raise DataError("there is nothing to train on: the demonstrations are empty; give at least one")
    if held_out and state.best_loss is None:
        loss = validation_loss(policy, held_out, token_budget=settings.token_budget)
        _judge(state, optimizer, loss, settings.min_improvement)
    while state.epoch < settings.epochs and not _finished(settings, state, bool(held_out)):
        order = list(range(len(samples)))
        random.Random(f"{seed}/{state.epoch}").shuffle(order)
        while state.position < len(order):
            chosen = [samples[i] for i in order[state.position : state.position + settings.batch_size]]
            rate = warmup_then_constant(state.step, peak=settings.learning_rate, warmup=settings.warmup_steps)
            with uninterrupted():
                began = time.monotonic()
                metrics = sft_update(
                    policy, optimizer, chosen, learning_rate=rate, token_budget=settings.token_budget
                )
                state.position += settings.batch_size
                state.step += 1
                seconds = time.monotonic() - began
                state.seconds += seconds
                metrics |= {"learning_rate": rate, "epoch": float(state.epoch), "seconds": seconds}
                on_step(state.step, metrics)
        began = time.monotonic()
        loss = validation_loss(policy, held_out, token_budget=settings.token_budget)  # 0 without samples
        with uninterrupted():
            state.epoch, state.position = state.epoch + 1, 0
            if held_out:
                _judge(state, optimizer, loss, settings.min_improvement)
                seconds = time.monotonic() - began
                state.seconds += seconds
                metrics = {"validation_loss": loss, "epoch": float(state.epoch), "seconds": seconds}
                on_step(state.step, metrics)
            on_epoch(state)
    if state.best:
        optimizer.load({f"master/{name}": t for name, t in state.best.items()})
    return state


def _judge(state: SftState, optimizer: MasterOptimizer, loss: float, min_improvement: float) -> None:
    """Keep a copy of the weights if their validation loss is the best so far."""
    if state.best_loss is None or loss < state.best_loss - min_improvement:
        state.best_loss, state.best_epoch = loss, state.epoch
        state.best = {name: t.detach().clone() for name, t in optimizer.masters.items()}


def _finished(settings: SftSection, state: SftState, validated: bool) -> bool:
    """Asked before an epoch, so that a run killed after its last epoch does not begin another.

    Inside an epoch the answer is that of its beginning: what was begun is ended.
    """
    if state.position:
        return False
    if settings.max_minutes is not None and state.seconds > settings.max_minutes * 60:
        return True
    return validated and state.epoch - state.best_epoch >= settings.patience
