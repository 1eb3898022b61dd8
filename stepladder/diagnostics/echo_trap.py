"""Echo trap (RAGEN, arXiv:2504.20073): siblings say the same, earn the same, and nothing is learnt.

In RAGEN's runs the spread of rewards within groups falls off long before the reward does; entropy falls with
it, and a spike of the gradient norm marks the point of no return.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics

MOVED = "approx_kl_of_last_5"


class EchoTrap(Detector):
    """Siblings that repeat each other while groups that were mixed fail as a whole: two rules, one verdict.

    *Shut*, for three steps: spread of rewards below half its peak, siblings that repeat each other (overlap
    of their n-grams above `repeated`, or surprisal below .6 of its peak), and the share of groups that all
    fail `lost` above its lowest. The last tells a trap from the end of learning on tasks some of which are
    beyond the policy: there the spread over open groups falls too, because the hopeless ones are left, but
    no group turns from mixed to failed. A gradient norm far above its average is added to the evidence.

    *Closing*, at once: the updates of the last five batches moved the policy by more than `leap` nats a token
    altogether, siblings begin to repeat each other and groups to be lost. It takes steps to tell the spread
    of a few groups from noise, and in those success falls; such leaps come before it. With one update a
    batch there is nothing to see in `approx_kl`, and only the first rule is left.
    """

    name = "echo_trap"
    averages = ("reward_std", "sibling_overlap", "surprisal", "grad_norm", "unsolved_groups")
    repeated = 0.6
    lost = 0.15
    # with both other signs .27 at most in healthy runs of all algorithms, .62 in one that dipped
    leap = 0.75
    begins = (0.5, 0.1)  # `repeated` and `lost` while the trap is closing
    message = "siblings say the same and earn the same, and tasks that were mixed are now lost"
    advice = (
        "keep exploring: lower rl.learning_rate to a tenth, do not divide advantages by their deviation "
        "(rl.credit.scale = 'none'), hold entropy up (rl.entropy.target), raise rl.clip.high to 0.28, drop "
        "the KL term (rl.kl.coefficient = 0)"
    )
    remedy = (
        Change("learning_rate", "times", 0.1),
        Change("credit.scale", "set", "none"),
        Change("clip.high", "at_least", 0.28),
        Change("kl.coefficient", "set", 0.0),
    )

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[float] = []  # approx_kl of the last five batches that were trained on

    def judge(self, metrics: Metrics) -> Evidence | None:
        moved = metrics.get("approx_kl", math.nan)
        if math.isfinite(moved):
            self.moves = [*self.moves[-4:], moved]
        std = self.smooth["reward_std"]
        if std.value is None:
            return None
        if sum(self.moves) > self.leap and self._repeats(*self.begins):
            return {**self._numbers(), MOVED: sum(self.moves)}
        if std.of_peak >= 0.5 or not self._repeats(self.repeated, self.lost):
            return None
        evidence = self._numbers()
        usual, now = self.smooth["grad_norm"].recent[-2:-1], metrics.get("grad_norm", 0.0)
        if usual and now > 5 * usual[0]:  # the average before this step
            evidence["grad_norm"] = now
        return evidence

    def waits(self, evidence: Evidence) -> int:
        """Five batches are patience enough."""
        return 1 if MOVED in evidence else self.patience

    def _repeats(self, repeated: float, lost: float) -> bool:
        """Do siblings say the same, and have groups been lost?"""
        same, surprisal, unsolved = (
            self.smooth[n] for n in ("sibling_overlap", "surprisal", "unsolved_groups")
        )
        if (same.value or 0.0) < repeated and surprisal.of_peak >= 0.6:
            return False
        return (
            unsolved.value is not None
            and unsolved.trough is not None
            and unsolved.value >= unsolved.trough + lost
        )

    def _numbers(self) -> Evidence:
        std, same, surprisal, unsolved = (
            self.smooth[n] for n in ("reward_std", "sibling_overlap", "surprisal", "unsolved_groups")
        )
        return {
            "reward_std": std.value or 0.0,
            "reward_std_peak": std.peak or 0.0,
            "sibling_overlap": same.value or 0.0,
            "surprisal": surprisal.value or 0.0,
            "surprisal_peak": surprisal.peak or 0.0,
            "unsolved_groups": unsolved.value or 0.0,
            "unsolved_groups_low": unsolved.trough or 0.0,
        }

    def cure(self) -> tuple[Change, ...]:
        """With an entropy to hold: half of what there was at the peak."""
        peak = self.smooth["surprisal"].peak
        return (
            self.remedy if not peak else (*self.remedy, Change("entropy.target", "set", round(peak / 2, 3)))
        )

    def state(self) -> dict[str, Any]:
        return {**super().state(), "moves": self.moves}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.moves = list(state.get("moves", ()))  # checkpoints of older versions have none
