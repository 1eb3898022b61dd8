"""Which tasks come next: every task of the split once an epoch, in a shuffled order that a seed fixes.

The sampler's whole state is a cursor, tasks that were put back, moving success rates and the level a
curriculum has reached, so that a resumed run goes on with exactly the tasks an uninterrupted one would have
drawn.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.run.records import task_from_dict, task_to_dict
from stepladder.types import Task

Mode = Literal["uniform", "adaptive", "prioritised", "curriculum"]
HALF = 0.5  # solve rate of the newest level at which the next one opens


class TaskSampler:
    """`next(n)` gives n (group id, task) pairs.

    "uniform" takes every task. The others walk the same order and keep a task with a probability:

    "adaptive": by its domain, p(1-p) of the moving success p, at least .2 while it is mostly unsolved (so
    that it is not given up) and .04 once it is solved (so that it is not forgotten).
    "prioritised": 1 - s of the task itself, or of its domain while it is new (Kimi k1.5, arXiv:2501.12599),
    at least .02.
    "curriculum": tasks of levels not yet open are skipped; an open level is kept by p(1-p), at least .04, the
    newest always. It starts with the lowest `data["level"]`; when the moving success of the newest reaches
    one half, the next opens.
    """

    def __init__(
        self, world: CheckedWorld, split: str, *, mode: Mode, seed: int, epochs: int | None = None
    ) -> None:
        self.world, self.split, self.mode, self.seed = world, split, mode, seed
        if epochs is not None and mode != "uniform":
            raise ConfigError(
                f"{epochs} epochs of tasks, some of which {mode!r} skips: none would be whole; try "
                "sampling = 'uniform', or epochs = None"
            )
        self.count = world.count(split)
        if self.count < 1:
            raise ConfigError(
                f"the split {split!r} has no tasks; give it at least one (splits: {list(world.splits())})"
            )
        self.cursor = 0
        self.drawn = 0  # tasks given out so far; the cursor also counts those that were skipped
        self.returned: list[tuple[str, Task]] = []  # put back: they come before all others
        self.end = math.inf if epochs is None else epochs * self.count  # of the data, in places of the order
        self.success: dict[str, float] = {}  # by domain
        self.tasks: dict[str, float] = {}  # by task, "prioritised" only
        self.levels: dict[int, float] = {}  # by level, "curriculum" only; those that are open
        if mode == "curriculum":
            self.known = levels_of(world, split)
            self.levels[self.known[0]] = 0.0

    def next(self, n: int) -> list[tuple[str, Task]]:
        """The next `n` tasks; the group id names the draw, so a task of a later epoch is another group.

        Fewer, or none, at the end of the last of `epochs`.
        """
        drawn, self.returned = self.returned[:n], self.returned[n:]
        self.drawn += len(drawn)
        skipped = 0
        while len(drawn) < n and self.cursor < self.end:
            cursor = self.cursor
            task = self.world.get(self.split, self._index(cursor))
            self.cursor += 1  # after `get`: a task that could not be read was not drawn
            if self._kept(task, cursor):
                self.drawn += 1
                drawn.append((f"{self.split}-{cursor}", task))
                skipped = 0
            else:
                skipped += 1
                if skipped > 100 * self.count + 1000:
                    raise ConfigError(
                        f"{skipped} tasks of the split {self.split!r} were skipped in a row "
                        f"(rl.tasks.sampling = {self.mode!r}); are there tasks of level "
                        f"{max(self.levels, default=0)}? Try rl.tasks.sampling = 'uniform'"
                    )
        return drawn

    def put_back(self, tasks: Sequence[tuple[str, Task]]) -> None:
        """Tasks that were drawn and never learned from: they are the next ones, under their group ids."""
        self.returned = [*tasks, *self.returned]
        self.drawn -= len(tasks)

    def saw(self, task: Task, success: float) -> None:
        """A finished group of `task` had this share of successes."""
        self.observe(task.domain, success)
        if self.mode == "prioritised":
            self.tasks[task.id] = 0.5 * self.tasks.get(task.id, success) + 0.5 * success
        if self.mode == "curriculum":
            level = level_of(task)
            newest = max(self.levels)
            self.levels[level] = 0.8 * self.levels.get(level, 0.0) + 0.2 * success
            higher = [known for known in self.known if known > newest]
            if level == newest and self.levels[newest] >= HALF and higher:
                self.levels[higher[0]] = 0.0

    def observe(self, domain: str, success: float) -> None:
        """A finished group of `domain` had this share of successes."""
        self.success[domain] = 0.8 * self.success.get(domain, 0.5) + 0.2 * success

    def state(self) -> dict[str, Any]:
        return {
            "cursor": self.cursor,
            "drawn": self.drawn,
            "returned": [[group_id, task_to_dict(task)] for group_id, task in self.returned],
            "success": dict(self.success),
            "tasks": dict(self.tasks),
            "levels": {str(level): rate for level, rate in self.levels.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.cursor, self.drawn = int(state["cursor"]), int(state["drawn"])
        self.returned = [(group_id, task_from_dict(task)) for group_id, task in state.get("returned", [])]
        self.success = {str(k): float(v) for k, v in state["success"].items()}
        self.tasks = {str(k): float(v) for k, v in state["tasks"].items()}
        self.levels = {int(k): float(v) for k, v in state["levels"].items()}

    def _index(self, cursor: int) -> int:
        """An affine shuffle of the epoch: visits every index once, needs no memory."""
        epoch, place = divmod(cursor, self.count)
        rng = random.Random(f"{self.seed}/{self.split}/{epoch}")
        factor = rng.randrange(1, self.count + 1)
        while math.gcd(factor, self.count) != 1:
            factor = rng.randrange(1, self.count + 1)
        return (factor * place + rng.randrange(self.count)) % self.count

    def _kept(self, task: Task, cursor: int) -> bool:
        if self.mode == "uniform":
            return True
        return random.Random(f"{self.seed}/keep/{cursor}").random() < self._share(task)

    def _share(self, task: Task) -> float:
        """The probability with which a task that comes up is taken."""
        if self.mode == "prioritised":
            solved = self.tasks.get(task.id, self.success.get(task.domain, 0.0))
            return max(1 - solved, 0.02)
        if self.mode == "curriculum":
            level = level_of(task)
            rate = self.levels.get(level)
            if rate is None or level == max(self.levels):
                return 0.0 if rate is None else 1.0
            return max(rate * (1 - rate), 0.04) / 0.25
        heaviest = max([_weight(p) for p in self.success.values()] + [0.25])
        return _weight(self.success.get(task.domain, 0.5)) / heaviest


@contextlib.contextmanager
def drawn_again(sampler: TaskSampler | None, done: Callable[[], object]) -> Iterator[None]:
    """Give tasks back that no finished step has learned from, so that a resumed run draws them again.

    `done()` returns another value once the step is finished. Without a sampler nothing is given back.
    """
    before, drawn_from = done(), None if sampler is None else sampler.state()
    try:
        yield
    except BaseException:
        if sampler is not None and drawn_from is not None and done() == before:
            sampler.load(drawn_from)
        raise


def level_of(task: Task) -> int:
    """How hard the task is said to be. Raises ConfigError where it does not say."""
    level = task.data.get("level")
    if isinstance(level, bool) or not isinstance(level, int):
        raise ConfigError(
            f"rl.tasks.sampling = 'curriculum' needs a whole number data['level'] in every task; {task.id} "
            f"has {level!r}. Add one, such as 1 for the easiest, or use rl.tasks.sampling = 'adaptive'"
        )
    return level


def levels_of(world: CheckedWorld, split: str, *, look_at: int = 2048) -> list[int]:
    """The levels of a split in ascending order, from at most `look_at` tasks spread over it."""
    count = world.count(split)
    stride = max(1, count // look_at)
    return sorted({level_of(world.get(split, i)) for i in range(0, count, stride)})


def _weight(p: float) -> float:
    return max(p * (1 - p), 0.2 if p < 0.5 else 0.04)
