"""All alarms of a run, asked step after step; what they remember can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepladder.diagnostics.alarm import Alarm, Detector, Metrics
from stepladder.diagnostics.echo_trap import EchoTrap
from stepladder.diagnostics.entropy_collapse import EntropyCollapse
from stepladder.diagnostics.gradient_spike import GradientSpike
from stepladder.diagnostics.input_agnostic import TemplateCollapse
from stepladder.diagnostics.length import LengthExplosion


def default_alarms(*, clipped_at: float = 1.0) -> list[Detector]:
    """One of each. clipped_at: the gradient norm that the optimiser scales down to."""
    return [
        EchoTrap(),
        EntropyCollapse(),
        TemplateCollapse(),
        GradientSpike(clipped_at=clipped_at),
        LengthExplosion(),
    ]


class Monitor:
    """Asks every alarm at every step.

    >>> monitor = Monitor()
    >>> monitor.see(1, {"reward": 0.2, "success": 0.2, "grad_norm": 1.0})
    []
    """

    def __init__(self, alarms: Sequence[Detector] | None = None) -> None:
        self.alarms = list(alarms) if alarms is not None else default_alarms()

    def see(self, step: int, metrics: Metrics) -> list[Alarm]:
        """The alarms that are raised at this step."""
        found = [detector.see(step, metrics) for detector in self.alarms]
        return [alarm for alarm in found if alarm is not None]

    def state(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint."""
        return {detector.name: detector.state() for detector in self.alarms}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; alarms that it does not know start anew."""
        for detector in self.alarms:
            if detector.name in state:
                detector.load(state[detector.name])
