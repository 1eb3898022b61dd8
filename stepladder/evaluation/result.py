"""What an evaluation found: the episodes of each task, and what they amount to together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepladder.types import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode. It votes for its `answer`, if it gave one; `score` is None where it was not scored."""

    solved: bool
    answer: str | None = None
    score: float | None = None
    tokens: int = 0
    failed: bool = False
    truncated: bool = False
    used_tool: bool = False


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """The episodes of one task, in the order they were asked for; failed ones are in it, as unsolved."""

    task: str
    domain: str
    samples: tuple[Sample, ...]

    @property
    def solved(self) -> int:
        return sum(sample.solved for sample in self.samples)

    @property
    def share(self) -> float:
        """Return the share of the episodes that solved the task."""
        return self.solved / len(self.samples)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tasks, each played equally often. Failed episodes were retried once; then they count as unsolved.

    `trajectories` are the episodes, task by task. `interval` is the 95 % interval of `success`.
    """

    tasks: tuple[TaskSamples, ...]
    trajectories: tuple[Trajectory, ...]
    interval: tuple[float, float]
    temperature: float
    seconds: float

    @property
    def n(self) -> int:
        """Return how many tasks were played."""
        return len(self.tasks)

    @property
    def solved(self) -> float:
        """Return how many tasks were solved; each counts by the share of its episodes that solved it."""
        return sum(task.share for task in self.tasks)

    @property
    def success(self) -> float:
        return self.solved / self.n

    @property
    def episodes(self) -> int:
        return sum(len(task.samples) for task in self.tasks)

    @property
    def tool_rate(self) -> float:
        """Return the share of the episodes that used a tool."""
        return sum(s.used_tool for s in self._samples()) / self.episodes

    @property
    def mean_tokens(self) -> float:
        """Return the mean number of sampled tokens per episode."""
        return sum(s.tokens for s in self._samples()) / self.episodes

    @property
    def failed(self) -> int:
        return sum(s.failed for s in self._samples())

    @property
    def truncated(self) -> int:
        return sum(s.truncated for s in self._samples())

    @property
    def without_answer(self) -> int:
        return sum(s.answer is None for s in self._samples())

    @property
    def by_domain(self) -> dict[str, tuple[float, int]]:
        """Return, by name of the domain, how many tasks were solved and how many there are."""
        found: dict[str, tuple[float, int]] = {}
        for task in self.tasks:
            solved, n = found.get(task.domain, (0.0, 0))
            found[task.domain] = (solved + task.share, n + 1)
        return dict(sorted(found.items()))

    def _samples(self) -> Iterator[Sample]:
        return (sample for task in self.tasks for sample in task.samples)
