"""What each rung was estimated to take, beside what it took: one line, and plan.json in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stepladder.atomic import write_file
from stepladder.errors import StepladderError
from stepladder.planning.command import chosen
from stepladder.planning.machine import Machine, PeakMeter, free_memory, measure
from stepladder.planning.measured import FILE, Measured, measured_json, read_measured
from stepladder.planning.needs import Needs
from stepladder.planning.plan import RungPlan, plan_recipe
from stepladder.recipe.config import Recipe

QUICK = 0.02  # seconds of each probe of the machine


class Forecast:
    """Measures a rung at its second update: the optimiser makes its moments at the end of the first."""

    def __init__(
        self, recipe: Recipe, needs: Mapping[str, Needs], folder: Path, say: Callable[[str], None]
    ) -> None:
        self.recipe, self.needs, self.folder, self.say = recipe, needs, folder, say
        self.device, self.dtype = chosen(recipe)
        self.meter = PeakMeter(self.device)
        self.measured = read_measured(folder)
        self._rung, self._updates, self._last = "", 0, (0, 0.0)

    def begin(self, rung: str) -> None:
        """A rung is climbed, from its start or from a checkpoint."""
        self._rung, self._updates = rung, 0
        self.meter.reset()

    def saw(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """A line of metrics; those without an update (a validation, a batch without signal) do not count."""
        updated = "grad_norm" in metrics and metrics.get("updated", 1.0) > 0
        if phase != self._rung or not updated or phase in self.measured:
            return
        self._updates += 1
        self._last = (step, metrics.get("seconds", 0.0))
        if self._updates == 2:
            self._write()

    def end(self) -> None:
        """The rung is done; one of a single update is measured at it."""
        if self._updates == 1 and self._rung not in self.measured:
            self._write()

    def _write(self) -> None:
        peak, (step, seconds) = self.meter.read(), self._last
        try:
            estimate = self._estimate()
        except StepladderError as error:  # such as a config.json without sizes: the run goes on without
            self.say(f"{self._rung}: {peak / 1e9:.2f} GB at the peak; there is no estimate of it: {error}")
            self._updates = 3
            return
        row = Measured(step, peak, seconds, estimate.peak, estimate.seconds or 0.0)
        self.measured[self._rung] = row
        write_file(self.folder / FILE, measured_json(self.measured))
        self.say(f"{self._rung}: {row.sentence()}")

    def _estimate(self) -> RungPlan:
        free, total, who = free_memory(self.device)
        rates = measure(self.device, self.dtype, seconds=QUICK)
        machine = Machine(self.device, free, total, who, *rates)
        plan = plan_recipe(self.recipe, self.needs, device=self.device, dtype=self.dtype, machine=machine)
        return next(rung for rung in plan.rungs if rung.name == self._rung)
