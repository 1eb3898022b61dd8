"""What an engine counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters since the last `stats()`.

    `generated` counts tokens of all requests; siblings that share a row count each. `row_steps` counts
    rows that decoded, so generated / row_steps shows what sharing gave (first tokens come with the prompt).
    """

    generated: int = 0
    seconds: float = 0.0
    steps: int = 0
    row_steps: int = 0
    prefill_computed: int = 0
    prefill_padded: int = 0
    prefill_saved: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time spent computing, prefill included."""
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def rows_per_step(self) -> float:
        return self.row_steps / self.steps if self.steps else 0.0
