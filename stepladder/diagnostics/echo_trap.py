"""Echo trap (RAGEN, arXiv:2504.20073): siblings say the same, earn the same, and nothing is learnt.

In RAGEN's runs the spread of rewards within groups falls off long before the reward does; entropy falls with
it, and a spike of the gradient norm marks the point of no return.
"""

from __future__ import annotations

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics


class EchoTrap(Detector):
    """Spread of rewards below half its peak, siblings that repeat each other, more groups that all fail.

    "Repeat" is an overlap of their n-grams above `repeated`, or surprisal below .6 of its peak. The third
    condition tells a trap from the end of learning on tasks some of which are beyond the policy: there the
    spread over open groups falls too, because the hopeless ones are left, but no group turns from mixed to
    failed. A gradient norm far above its average is added to the evidence: it makes the case worse.
    """

    name = "echo_trap"
    averages = ("reward_std", "sibling_overlap", "surprisal", "grad_norm", "unsolved_groups")
    repeated = 0.6
    lost = 0.15
    message = "siblings say the same and earn the same, and tasks that were mixed are now lost"
    advice = (
        "keep exploring: lower rl.learning_rate to a tenth, do not divide advantages by their deviation "
        "(rl.scale = 'none'), hold entropy up (rl.entropy_target), raise rl.clip_high to 0.28, drop the KL "
        "term (rl.kl_coefficient = 0)"
    )
    remedy = (
        Change("learning_rate", "times", 0.1),
        Change("scale", "set", "none"),
        Change("clip_high", "at_least", 0.28),
        Change("kl_coefficient", "set", 0.0),
    )

    def judge(self, metrics: Metrics) -> Evidence | None:
        std, same, surprisal = (self.smooth[n] for n in ("reward_std", "sibling_overlap", "surprisal"))
        unsolved = self.smooth["unsolved_groups"]
        if std.value is None or std.of_peak >= 0.5:
            return None
        if (same.value or 0.0) < self.repeated and surprisal.of_peak >= 0.6:
            return None
        if unsolved.value is None or unsolved.trough is None or unsolved.value < unsolved.trough + self.lost:
            return None
        evidence = {
            "reward_std": std.value,
            "reward_std_peak": std.peak or 0.0,
            "sibling_overlap": same.value or 0.0,
            "surprisal": surprisal.value or 0.0,
            "surprisal_peak": surprisal.peak or 0.0,
            "unsolved_groups": unsolved.value,
            "unsolved_groups_low": unsolved.trough,
        }
        usual, now = self.smooth["grad_norm"].recent[-2:-1], metrics.get("grad_norm", 0.0)
        if usual and now > 5 * usual[0]:  # the average before this step
            evidence["grad_norm"] = now
        return evidence

    def cure(self) -> tuple[Change, ...]:
        """With an entropy to hold: half of what there was at the peak."""
        peak = self.smooth["surprisal"].peak
        return (
            self.remedy if not peak else (*self.remedy, Change("entropy_target", "set", round(peak / 2, 3)))
        )
