"""Gradient spikes: norms far above what this run is used to, several within a few updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics

ALONE = 1e-6
"""An `approx_kl` below this is rounding: the one update of a batch has not moved anything yet."""


class GradientSpike(Detector):
    """Two of the last five norms above five times the median of the last twenty, and above what is clipped.

    One spike is a matter of one batch, and the clip takes it; a norm below `clipped_at` moves no more than
    any other step. Where a batch has several updates, `approx_kl` says how far they moved the policy: while
    none of the last five moved it by `leap` nats a token, spikes did no harm (a third of the healthy runs of
    bench/algorithms.py have such). Steps without an update are no observation.
    """

    name = "gradient_spike"
    patience = 1
    leap = 0.2
    message = "the gradient norm jumps, again and again, far above its median"
    advice = "lower rl.learning_rate, or take fewer rl.updates_per_batch"
    remedy = (Change("learning_rate", "times", 0.5),)

    def __init__(self, *, clipped_at: float = 1.0, factor: float = 5.0) -> None:
        super().__init__()
        self.clipped_at, self.factor = clipped_at, factor
        self.norms: list[float] = []
        self.spikes: list[bool] = []
        self.moves: list[float] = []

    def judge(self, metrics: Metrics) -> Evidence | None:
        norm = metrics.get("grad_norm", 0.0)
        if not metrics.get("updated", 1.0) or not norm > 0.0:
            return None
        moved = metrics.get("approx_kl", 0.0)
        self.moves = [*self.moves[-4:], moved if math.isfinite(moved) else self.leap]
        known = self.norms
        self.norms = [*known[-19:], norm]
        if len(known) < 10:
            return None
        usual = median(known)
        self.spikes = [*self.spikes[-4:], norm > self.factor * usual and norm > self.clipped_at]
        if sum(self.spikes) < 2 or not self.spikes[-1]:
            return None
        if ALONE < max(self.moves) < self.leap:
            return None
        return {"grad_norm": norm, "median": usual, "spikes_of_last_5": float(sum(self.spikes))}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "norms": self.norms, "spikes": self.spikes, "moves": self.moves}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.norms, self.spikes = list(state["norms"]), list(state["spikes"])
        self.moves = list(state.get("moves", ()))  # checkpoints of older versions have none
