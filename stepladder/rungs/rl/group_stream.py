"""Groups that are played while the policy is trained: a bounded queue that starves no task and loses none.

Admission. With `per_step` groups a step and a staleness of at most S, no more than (S + 1) · per_step groups
are outstanding (begun, not yet handed out). A group begun while the learner stood at version v is handed
out at v + S at the latest, so no token in it is more than S updates old.

Order. `take` hands out the oldest finished groups; where leaving an older one out would break the bound
later, it waits for it. So a slow task is trained on as often as a fast one.

S = 0 is the synchronous loop: all groups of a step begin together and the step waits for all of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from stepladder.errors import ConfigError
from stepladder.types import Group, Task

Draw = Callable[[], tuple[str, Task] | None]
Play = Callable[[str, Task, int], Awaitable[Group]]
Begun = tuple[str, Task, int, Group | None]  # group id, task, version at its beginning, the group if finished


@dataclass(eq=False, slots=True)
class Outstanding:
    """A group that was begun and not yet handed out. `born`: the learner's version when it was begun."""

    order: int
    group_id: str
    task: Task
    born: int
    job: asyncio.Future[Group] | None = None
    group: Group | None = None

    @property
    def waits(self) -> bool:
        """Not begun yet: it has no tokens that could be too old."""
        return self.job is None and self.group is None


class GroupStream:
    """All methods run on one event loop. `draw` gives the next (group id, task), None at the end of the data;
    `play(group id, task, order)` plays one group.

    `at_once` bounds how many groups are played at the same time; the others wait in order.
    """

    def __init__(
        self, draw: Draw, play: Play, *, per_step: int, max_staleness: int, at_once: int, version: int = 0
    ) -> None:
        if per_step < 1 or max_staleness < 0 or at_once < 1:
            raise ConfigError(
                f"a stream needs per_step >= 1, max_staleness >= 0, at_once >= 1; got {per_step}, "
                f"{max_staleness}, {at_once}; try 8, 1 and 32"
            )
        self._draw, self._play = draw, play
        self.per_step, self.max_staleness, self.at_once = per_step, max_staleness, at_once
        self.version = version
        self.ended = False  # the data are at their end; what is outstanding still comes
        self._outstanding: list[Outstanding] = []
        self._handed: list[Outstanding] = []  # handed out, not learned from before `advance`
        self._order = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = asyncio.Event()
        self._limit = (max_staleness + 1) * per_step  # of outstanding groups; a restored stream may have more

    # -- what the learner does --------------------------------------------------------------------------

    async def take(self) -> list[Group]:
        """The groups of the next step; fewer, or none, at the end of the data.

        Raises the first exception of a job, at once: it is an error in the program, since failures of the
        world are recorded in the groups. RuntimeError where something else cancelled a job: its group would
        never come.
        """
        self._admit()
        while True:
            if self._failure is not None:
                await self.close()
                raise self._failure
            chosen = self._choose()
            if chosen is not None:
                break
            self._changed.clear()
            await self._changed.wait()
        self._outstanding = [item for item in self._outstanding if item not in chosen]
        self._handed = chosen
        return [item.group for item in chosen if item.group is not None]

    def advance(self) -> None:
        """The learner has made an update and the engine has the new weights: more may begin."""
        self.version += 1
        self._handed = []
        self._admit()

    async def close(self) -> None:
        """Cancel what is being played and wait until it has cleaned up. Idempotent."""
        self.ended = self._closing = True
        jobs = [item.job for item in self._outstanding if item.job is not None]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    # -- the checkpoint ---------------------------------------------------------------------------------

    def outstanding(self) -> list[Outstanding]:
        """What was begun and not learned from, oldest first: a resumed run has to play or hand it out."""
        return [*self._handed, *self._outstanding]

    def restore(self, waiting: Sequence[Begun]) -> int:
        """Take over what an earlier stream had outstanding.

        Under a smaller `per_step` or `max_staleness` than before, groups whose turn would come too late are
        played again. Returns how many of the finished ones are kept.
        """
        kept: dict[str, Group] = {}
        for group_id, _, born, group in sorted(waiting, key=lambda item: item[2]):
            turn = self.version + len(kept) // self.per_step
            if group is not None and turn <= born + self.max_staleness:
                kept[group_id] = group
        for group_id, task, born, _ in waiting:
            # What is played again is played with the weights of now.
            self._add(group_id, task, born if group_id in kept else self.version, kept.get(group_id))
        self._outstanding.sort(key=lambda item: item.group is None)  # what has tokens goes first
        return len(kept)

    # -- inside -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while not self.ended and len(self._outstanding) < self._limit:
            drawn = self._draw()
            if drawn is None:
                self.ended = True
                break
            self._add(*drawn, self.version, None)
        self._begin()

    def _add(self, group_id: str, task: Task, born: int, group: Group | None) -> None:
        self._outstanding.append(Outstanding(self._order, group_id, task, born, None, group))
        self._order += 1

    def _begin(self) -> None:
        playing = sum(item.job is not None and item.group is None for item in self._outstanding)
        # Groups handed out and not learned from yet are still in the way of those behind them.
        for item in self._outstanding[: self._limit - len(self._handed)]:
            if playing >= self.at_once:
                return
            if item.waits:
                item.born = self.version  # it waited in the queue; its tokens are of now
                job = item.job = asyncio.ensure_future(self._play(item.group_id, item.task, item.order))
                job.add_done_callback(functools.partial(self._ended, item))
                playing += 1

    def _ended(self, item: Outstanding, job: asyncio.Future[Group]) -> None:
        self._changed.set()
        error = _error_of(job, item.group_id)
        if self._closing:
            return
        if error is None:
            item.group = job.result()
        elif self._failure is None:  # the learner raises it; the first one is the cause
            self._failure = error
        if self._failure is None:
            self._begin()

    def _choose(self) -> list[Outstanding] | None:
        """The oldest finished groups, if they are enough and everyone left can still come in time.

        None: wait. With all groups finished there is always a choice, because no more are admitted than
        S + 1 steps can hand out.
        """
        wanted = min(self.per_step, len(self._outstanding))
        by_age = sorted(self._outstanding, key=lambda item: (item.waits, item.born, item.order))
        chosen = [item for item in by_age if item.group is not None][:wanted]
        if len(chosen) < wanted:
            return None
        left = [item for item in by_age if item not in chosen]
        for place, item in enumerate(left):  # handed out at version + 1, + 2, ..., per_step at a time
            late = self.version + 1 + place // self.per_step > item.born + self.max_staleness
            if late and not item.waits:
                return None
        return chosen


def _error_of(job: asyncio.Future[Group], group_id: str) -> BaseException | None:
    if not job.cancelled():
        return job.exception()
    return RuntimeError(
        f"the job that plays group {group_id!r} was cancelled by code that is not stepladder's (an "
        "environment, a library it uses)"
    )
