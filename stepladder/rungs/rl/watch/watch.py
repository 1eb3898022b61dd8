"""What watches an RL run from within: promises on every batch and sync, alarms after every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stepladder.diagnostics.alarm import Alarm
from stepladder.diagnostics.dependence import prompt_retrieval
from stepladder.diagnostics.health import health_metrics
from stepladder.diagnostics.monitor import Monitor, default_alarms
from stepladder.diagnostics.variety import variety_metrics
from stepladder.policies.policy import Policy
from stepladder.recipe.rl import RlSection
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.rl.watch.batch_promises import ReferenceGuard, check_masks
from stepladder.rungs.rl.watch.canary import Canary
from stepladder.rungs.rl.watch.cross_scores import prompt_information
from stepladder.rungs.rl.watch.mismatch_cause import cause_of_mismatch
from stepladder.rungs.rl.watch.remedy import remedied, with_keys
from stepladder.types import Group, TrainingSample
from stepladder.workbench.bench import Workbench

# A forward pass of about a tenth of a step: made every few steps, and in each once there is something to see.
CROSS_SCORED_EVERY = 5
SUSPECT = 0.75  # of the largest dependence on the prompt so far


class Watch:
    """The checks and alarms of one RL run. `settings` are those in force: a remedy changes them.

    Raises InvariantError, from wherever a promise does not hold, with its cause.
    """

    def __init__(self, bench: Workbench, settings: RlSection, *, reference: Policy | None = None) -> None:
        self.bench, self.settings = bench, settings
        self.monitor = Monitor(default_alarms(clipped_at=settings.max_grad_norm))
        self.remedied: list[str] = []  # alarms whose remedy has been applied
        self.changed: dict[str, Any] = {}  # keys that remedies changed, and to what
        self.information = 0.0, 0.0  # how much responses depend on their prompts: the last, the largest
        self.temperature = bench.recipe.rollout.temperature
        self._canary: Canary | None = None
        self._guard: ReferenceGuard | None = None
        if reference is not None:
            self.guard(reference)

    def guard(self, reference: Policy) -> None:
        """From now on `reference` must stay as it is."""
        self._guard = ReferenceGuard(self.bench.policy, reference)

    def sampled(self, step: int, groups: Sequence[Group], samples: Sequence[TrainingSample]) -> Metrics:
        """Before the update: check the masks, and measure what the alarms will read. step: counts from 0."""
        if self._canary is None:  # the engine has just sampled with what should be the policy's weights
            self._canary = Canary(self.bench.policy, self.bench.engine)
        check_masks(samples, groups)
        information = math.nan
        if step % CROSS_SCORED_EVERY == 0 or self.information[0] < SUSPECT * self.information[1]:
            information = prompt_information(
                self.bench.policy,
                groups,
                temperature=self.temperature,
                token_budget=self.settings.token_budget,
            )
        if not math.isnan(information):
            self.information = information, max(information, self.information[1])
        return {
            **health_metrics(groups, self.bench.engine_version),
            **variety_metrics(groups),
            "prompt_retrieval": prompt_retrieval(groups),
            "prompt_information": information,
        }

    def cause(self, samples: Sequence[TrainingSample]) -> str:
        """Why sampler and trainer disagree on `samples`."""
        return cause_of_mismatch(self.bench.policy, self.bench.engine, samples, temperature=self.temperature)

    def synced(self, metrics: Mapping[str, float]) -> Metrics:
        """After the update and its sync: the engine has the new weights, the reference its old ones."""
        if self._guard is not None:
            self._guard.check(metrics)
        assert self._canary is not None
        return {"canary": self._canary.check(self.bench.engine_version)}

    def finished(self, step: int, metrics: Mapping[str, float]) -> list[tuple[Alarm, dict[str, Any]]]:
        """After a step: the alarms it raised, each with the settings its remedy changed.

        Nothing is changed unless `rl.on_alarm` is "remedy", and for each alarm once in a run.
        """
        out = []
        for alarm in self.monitor.see(step, metrics):
            changed: dict[str, Any] = {}
            if self.settings.on_alarm == "remedy" and alarm.name not in self.remedied:
                self.settings, changed = remedied(self.settings, alarm.remedy)
                self.remedied.append(alarm.name)
                self.changed |= {key: after for key, (_, after) in changed.items()}
            out.append((alarm, changed))
        return out

    def state(self) -> dict[str, Any]:
        """For the checkpoint: what the alarms remember, and what remedies changed of the recipe."""
        return {
            "monitor": self.monitor.state(),
            "remedied": self.remedied,
            "changed": self.changed,
            "information": list(self.information),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, under the recipe of now with the remedies applied."""
        self.monitor.load(state["monitor"])
        self.remedied = list(state["remedied"])
        self.changed = dict(state["changed"])
        last, largest = state["information"]
        self.information = last, largest
        self.settings = with_keys(self.settings, self.changed)
