"""What a rung is handed: the policy, its engine, the world, and `play`. `prepare` builds it from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepladder.data.encoder import Encoder
from stepladder.engines.engine import PolicyEngine
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError
from stepladder.play.agent import Agents
from stepladder.play.loop_thread import LoopThread
from stepladder.play.player import Player
from stepladder.play.rollout import Limits, Scorer
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.types import Group, Task
from stepladder.workbench.memory import MemoryLimit
from stepladder.workbench.sources import Sources


@dataclass
class Workbench:
    """The parts of a run. `runner` owns the one event loop on which every episode of the run is played.

    The engine is made by `start_engine` when something is first sampled: a rung on files never needs one.
    `make_agents(engine, temperature, max_tokens)` gives those that act.
    """

    recipe: CommonRecipe
    environment: CheckedWorld | None
    policy: Policy
    renderer: Encoder
    limits: Limits
    scorer: Scorer | None
    runner: LoopThread
    start_engine: Callable[[], PolicyEngine]
    make_agents: Callable[[PolicyEngine, float, int | None], Agents]
    sources: Sources = field(default_factory=Sources)
    engine_version: int = 0
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    _engine: PolicyEngine | None = None

    @property
    def world(self) -> CheckedWorld:
        """The environment. Raises ConfigError in a recipe that has none."""
        if self.environment is None:
            raise ConfigError('this needs an environment; add a section [environment] with name = "..."')
        return self.environment

    @property
    def engine(self) -> PolicyEngine:
        """What samples from the policy, on its weights of the last `sync`."""
        if self._engine is None:
            self._engine = self.start_engine()
            if self.engine_version:
                self._engine.sync(self.engine_version)
        return self._engine

    def sync(self, version: int | None = None) -> None:
        """Tell the engine that the policy's weights have changed or, with a `version`, were restored."""
        self.engine_version = self.engine_version + 1 if version is None else version
        if self._engine is not None:
            self._engine.sync(self.engine_version)

    def agents(self, temperature: float, max_tokens: int | None = None) -> Agents:
        """Return agents that sample from the policy, up to `max_tokens` per turn (the recipe's)."""
        return self.make_agents(self.engine, temperature, max_tokens)

    @property
    def player(self) -> Player:
        """What episodes are played with; the engine is there when this returns."""
        _ = self.engine  # started by this thread: the event loop must not wait for a server
        return Player(self.agents, self.world, self.limits, self.scorer, self.recipe.rollout.temperature)

    def play(self, tasks: Sequence[tuple[str, Task]], **options: Any) -> list[Group]:
        """Play episodes and wait for them; `options` are those of `Player.play`."""
        return self.runner.run(self.player.play(tasks, **options))

    def close(self) -> None:
        """End the compute thread, the world and the event loop."""
        with self.runner:
            try:
                if self._engine is not None:
                    self.runner.run(self._engine.close())
            finally:
                if self.environment is not None:
                    self.runner.run(self.environment.teardown())
