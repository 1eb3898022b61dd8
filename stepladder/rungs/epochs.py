"""Epochs over a fixed set of batches until the validation loss stops falling; the best weights are kept.

What an update and a validation are is handed in; what is here is the order of things, the early stop, and
what a resumed run needs to go on as if nothing had happened.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from stepladder.policies.optimizer import MasterOptimizer
from stepladder.reports.wording import NONE_BETTER
from stepladder.run.interrupt import uninterrupted

Metrics = dict[str, float]
T = TypeVar("T")
MASTER, BEST = "master/", "best/"  # how names of weights begin in a checkpoint


class EpochSettings(Protocol):
    """The keys that a recipe section of an epoch-wise rung has."""

    @property
    def epochs(self) -> int: ...
    @property
    def patience(self) -> int: ...
    @property
    def min_improvement(self) -> float: ...
    @property
    def max_minutes(self) -> float | None: ...


@dataclass(slots=True)
class EpochState:
    """Where the loop stands: everything a resumed run needs besides weights and moments."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None  # None: nothing validated yet
    best_epoch: int = 0  # 0: the weights that the rung began with
    best_step: int = 0
    mark_loss: float | None = None  # the loss that the next epochs have to fall below by `min_improvement`
    mark_epoch: int = 0  # the epoch that reached it: `patience` counts from here
    best: dict[str, Tensor] = field(default_factory=dict)  # master weights of the best epoch

    def plain(self) -> dict[str, Any]:
        """As JSON, without the tensors."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
            "best_step": self.best_step,
            "mark_loss": self.mark_loss,
            "mark_epoch": self.mark_epoch,
        }

    def checkpoint(self) -> dict[str, Any]:
        """As JSON, with where `of` finds the best weights."""
        return {**self.plain(), "at_best": self.at_best}

    def tensors(self) -> dict[str, Tensor]:
        """The best weights for a checkpoint; none where they are the optimiser's masters, which it has."""
        return {} if self.at_best else {f"{BEST}{name}": t for name, t in self.best.items()}

    @classmethod
    def of(cls, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> EpochState:
        """The opposite of `checkpoint` and `tensors`; other keys and tensors are left out."""
        kept = MASTER if state["at_best"] else BEST
        best = {k.removeprefix(kept): t for k, t in tensors.items() if k.startswith(kept)}
        # Checkpoints of older runs have one mark, the best epoch.
        known = {"mark_loss": state["best_loss"], "mark_epoch": state["best_epoch"], **state}
        return cls(**{key: known[key] for key in cls().plain()}, best=best)

    @property
    def at_best(self) -> bool:
        """Are the present weights the best ones?"""
        return bool(self.best) and self.best_step == self.step


def run_epochs(
    optimizer: MasterOptimizer,
    settings: EpochSettings,
    state: EpochState,
    *,
    batches: Callable[[int], Sequence[list[int]]],
    update: Callable[[list[int], int], Metrics],
    validate: Callable[[], Metrics] | None,
    on_step: Callable[[int, Metrics], None],
    on_epoch: Callable[[EpochState], None],
) -> EpochState:
    """Train until `patience` epochs brought no `validation_loss` that is lower by `min_improvement`, then put
    the weights of the lowest one back, however little lower it was.

    `batches(epoch)`: the rows of each batch, equally many batches in every epoch. `update(rows, step)` is
    one optimiser step, `step` counted from 0. `validate` returns metrics with `validation_loss`; without it
    all epochs are run and the last weights stay. The best weights are those the rung began with where no
    epoch made them better. `state` may lie inside an epoch (a Ctrl-C fell there): its remaining batches come
    first. `on_epoch` is where a checkpoint is taken.
    """
    if validate is not None and state.best_loss is None:
        _keep_best(validate(), optimizer, settings, state)
    while state.epoch < settings.epochs and not _finished(settings, state, validate is not None):
        order = batches(state.epoch)
        for rows in order[state.step - state.epoch * len(order) :]:
            with uninterrupted():
                began = time.monotonic()
                metrics = update(rows, state.step)
                seconds = time.monotonic() - began
                state.step += 1
                state.seconds += seconds
                on_step(state.step, {**metrics, "epoch": float(state.epoch), "seconds": seconds})
        with uninterrupted():
            state.epoch += 1
            if validate is not None:
                began = time.monotonic()
                metrics = validate()
                _keep_best(metrics, optimizer, settings, state)
                seconds = time.monotonic() - began
                state.seconds += seconds
                where = {"epoch": float(state.epoch), "best_epoch": float(state.best_epoch)}
                on_step(state.step, {**metrics, **where, "seconds": seconds})
            on_epoch(state)
    if state.best:
        optimizer.load({f"{MASTER}{name}": t for name, t in state.best.items()})
    return state


def shuffled(rows: Sequence[T], seed: str) -> list[T]:
    """Return the rows in an order that `seed` fixes."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order


def shuffled_batches(count: int, size: int, seed: str) -> list[list[int]]:
    """Return the rows 0 to `count` - 1 in batches of `size`, in an order that `seed` fixes."""
    order = shuffled(range(count), seed)
    return [order[i : i + size] for i in range(0, count, size)]


def none_better(state: EpochState, what: str = "rung") -> str:
    """What is to be said where the weights that it all began with were put back; else ""."""
    if state.best_loss is None or state.best_epoch or not state.epoch:
        return ""
    return NONE_BETTER.format(what)


def _keep_best(
    metrics: Metrics, optimizer: MasterOptimizer, settings: EpochSettings, state: EpochState
) -> None:
    """Keep the weights where the validation loss is the lowest so far; move the mark by `min_improvement`."""
    loss = metrics["validation_loss"]
    if state.mark_loss is None or loss < state.mark_loss - settings.min_improvement:
        state.mark_loss, state.mark_epoch = loss, state.epoch
    if state.best_loss is None or loss < state.best_loss:
        state.best_loss, state.best_epoch, state.best_step = loss, state.epoch, state.step
        state.best = {name: t.detach().clone() for name, t in optimizer.masters.items()}


def _finished(settings: EpochSettings, state: EpochState, validated: bool) -> bool:
    """Asked before an epoch, so that a run killed after its last epoch does not begin another."""
    if settings.max_minutes is not None and state.seconds > settings.max_minutes * 60:
        return True
    return validated and state.epoch - state.mark_epoch >= settings.patience
