"""Echo trap (RAGEN, arXiv:2504.20073): siblings say the same, earn the same, and nothing is learnt.

In RAGEN's runs the spread of rewards within groups falls off long before the reward does; entropy falls with
it, and a spike of the gradient norm marks the point of no return.
"""

from __future__ import annotations

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics


class EchoTrap(Detector):
    """Spread of rewards below half its peak while reward does not rise, and siblings repeat each other.

    "Repeat" is an overlap of their n-grams above `repeated`, or surprisal below half its peak. A gradient
    norm far above its average is added to the evidence: it makes the case worse, not different.
    """

    name = "echo_trap"
    averages = ("reward_std", "sibling_overlap", "surprisal", "grad_norm")
    repeated = 0.6
    message = "siblings say the same and earn the same, while tasks are still unsolved"
    advice = (
        "keep exploring: halve rl.learning_rate, do not divide advantages by their deviation "
        "(rl.scale = 'none'), raise rl.clip_high to 0.28 and drop the KL term (rl.kl_coefficient = 0)"
    )
    remedy = (
        Change("learning_rate", "times", 0.5),
        Change("scale", "set", "none"),
        Change("clip_high", "at_least", 0.28),
        Change("kl_coefficient", "set", 0.0),
        Change("entropy_coefficient", "at_least", 0.02),
    )

    def judge(self, metrics: Metrics) -> Evidence | None:
        std, same, surprisal = (self.smooth[n] for n in ("reward_std", "sibling_overlap", "surprisal"))
        if std.value is None or std.of_peak >= 0.5 or self.improving():
            return None
        if (same.value or 0.0) < self.repeated and surprisal.of_peak >= 0.5:
            return None
        evidence = {
            "reward_std": std.value,
            "reward_std_peak": std.peak or 0.0,
            "sibling_overlap": same.value or 0.0,
            "surprisal": surprisal.value or 0.0,
            "surprisal_peak": surprisal.peak or 0.0,
        }
        usual, now = self.smooth["grad_norm"].value, metrics.get("grad_norm", 0.0)
        if usual and now > 5 * usual:
            evidence["grad_norm"] = now
        return evidence
