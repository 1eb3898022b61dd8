"""The one door to episodes: whoever plays any brings world, agents, limits and scorer along.

Training, rejection sampling, step labels and evaluation play through it, so none of them can forget one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepladder.environments.checked import CheckedWorld
from stepladder.play.agent import Agents
from stepladder.play.rollout import Limits, Progress, Scorer, rollout
from stepladder.types import Group, Task


@dataclass(frozen=True, slots=True)
class Player:
    """What episodes are played with.

    `agents(temperature)` makes those that act, and `temperature` is the usual one. Most take a second
    argument: the most tokens that they may sample per turn.
    """

    agents: Callable[..., Agents]
    world: CheckedWorld
    limits: Limits
    scorer: Scorer | None
    temperature: float

    def play(
        self,
        tasks: Sequence[tuple[str, Task]],
        *,
        seed: int,
        group_size: int = 1,
        temperature: float | None = None,
        agents: Agents | None = None,
        max_turns: int | None = None,
        on_trajectory: Progress | None = None,
        key: str = "",
    ) -> Coroutine[Any, Any, list[Group]]:
        """Play `group_size` episodes of every (group id, task); see `rollout`.

        `agents` act instead of the usual ones, and `max_turns` holds instead of the usual limit.
        """
        chosen = agents or self.agents(self.temperature if temperature is None else temperature)
        limits = self.limits if max_turns is None else replace(self.limits, max_turns=max_turns)
        return rollout(
            chosen,
            self.world,
            tasks,
            group_size=group_size,
            limits=limits,
            seed=seed,
            scorer=self.scorer,
            on_trajectory=on_trajectory,
            key=key,
        )
