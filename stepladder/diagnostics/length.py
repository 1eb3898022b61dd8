"""Length: responses that grow without earning more, and episodes that run into a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepladder.diagnostics.alarm import Detector, Evidence, Metrics


class LengthExplosion(Detector):
    """Twice as long as over its first five steps, or cut by a limit far more often, without a rising reward.

    "Far more often": at least .3 of the episodes, and .2 more than over the first five steps.
    """

    name = "length_explosion"
    averages = ("response_length", "truncated")
    patience = 5
    message = "responses grow, or are cut, while the reward does not rise"
    advice = (
        "charge for length: rl.algorithm = 'dr_grpo' or rl.aggregation = 'token_mean' (no advantage for long "
        "wrong answers); raise rollout.max_tokens only if the text that is cut is worth reading"
    )

    def __init__(self) -> None:
        super().__init__()
        self.first: list[tuple[float, float]] = []

    def judge(self, metrics: Metrics) -> Evidence | None:
        length, cut = self.smooth["response_length"].value, self.smooth["truncated"].value
        if length is None or cut is None:
            return None
        if len(self.first) < 5:
            self.first.append((metrics["response_length"], metrics["truncated"]))
            return None
        usual = sum(pair[0] for pair in self.first) / 5
        usually_cut = sum(pair[1] for pair in self.first) / 5
        longer = length > 2 * usual
        if not (longer or (cut >= 0.3 and cut >= usually_cut + 0.2)) or self.improving():
            return None
        return {"response_length": length, "at_the_start": usual, "truncated": cut}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "first": [list(pair) for pair in self.first]}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.first = [(pair[0], pair[1]) for pair in state["first"]]
