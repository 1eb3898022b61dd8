"""Entropy collapse: on tasks that are still unsolved the policy has all but stopped to try anything else."""

from __future__ import annotations

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics


class EntropyCollapse(Detector):
    """Surprisal of sampled tokens below a tenth of its peak and below 0.05 nats, while reward does not rise.

    With temperature 1 and 0.05 nats a token nearly every sample is the greedy one: no group can be mixed.
    """

    name = "entropy_collapse"
    averages = ("surprisal",)
    message = "almost every token is certain, while tasks are still unsolved"
    advice = (
        "give rare tokens room: raise rl.clip.high (0.28), lower rl.learning_rate, or raise "
        "rollout.temperature"
    )
    remedy = (Change("clip.high", "at_least", 0.28), Change("learning_rate", "times", 0.3))

    def judge(self, metrics: Metrics) -> Evidence | None:
        surprisal = self.smooth["surprisal"]
        if surprisal.value is None or surprisal.value >= 0.05 or surprisal.of_peak >= 0.1:
            return None
        if self.improving():
            return None
        return {"surprisal": surprisal.value, "surprisal_peak": surprisal.peak or 0.0}
