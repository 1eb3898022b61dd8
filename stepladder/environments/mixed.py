"""Several worlds as one, with weights: one run that trains in all of them.

    [environment]
    name = "mixed"
    [[environment.options.worlds]]
    name = "calculator"
    weight = 2
    [[environment.options.worlds]]
    name = "hidden_digit"
    options = { plain = false }

The domain of a task becomes "calculator/addition": what stands before the first "/" is the world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepladder.boundary import require_index
from stepladder.environments.checked import CheckedEnvironment, CheckedWorld
from stepladder.environments.environment import as_world, load_world
from stepladder.errors import ConfigError, nearest
from stepladder.types import Message, Reset, Step, Task

ROUND = 100  # tasks after which the worlds' shares repeat
_KEYS = ("name", "weight", "options", "label")
_FOREVER = 1e9  # seconds: the mixture's own deadline bounds every phase already


class MixedWorld:
    """Tasks of several worlds, interleaved by weight.

    worlds: tables with `name` (a bundled world or an import path), and optionally `weight` (1), `options` of
    that world and `label`, the prefix of its domains (its name). In place of a name a world itself may stand.

    Of every 100 tasks each world has its share, spread evenly. The training split is as long as it takes to
    show every task once; tasks of smaller worlds then come again. Other splits repeat nothing: they end with
    the world that runs out first.
    """

    def __init__(self, worlds: Sequence[Mapping[str, Any]]) -> None:
        if not worlds:
            raise ConfigError('a mixture needs worlds; for example worlds = [{ name = "calculator" }]')
        self.worlds: dict[str, CheckedWorld] = {}
        weights: list[float] = []
        for entry in worlds:
            label, world, weight = _read(entry)
            if label in self.worlds:
                raise ConfigError(f"two worlds are called {label!r}; give one of them another label")
            self.worlds[label] = world
            weights.append(weight)
        self.labels = list(self.worlds)
        self.pattern = interleaved([w / sum(weights) for w in weights], ROUND)
        self.shares = [self.pattern.count(k) for k in range(len(weights))]
        if 0 in self.shares:
            small = self.labels[self.shares.index(0)]
            raise ConfigError(
                f"the weight of {small!r} is too small: it has none of {ROUND} tasks; at least "
                f"{sum(weights) / ROUND:g} is needed"
            )

    @property
    def disjoint_splits(self) -> bool:
        """False where one of the worlds says so (check_environment reads this)."""
        return all(getattr(world.inner, "disjoint_splits", True) for world in self.worlds.values())

    def splits(self) -> tuple[str, ...]:
        """The splits that every world has."""
        first, *others = self.worlds.values()
        return tuple(s for s in first.splits() if all(s in other.splits() for other in others))

    def count(self, split: str) -> int:
        counts = [world.count(split) for world in self.worlds.values()]
        if 0 in counts:
            return 0
        rounds = [n / share for n, share in zip(counts, self.shares)]
        if split == "train":
            return math.ceil(max(rounds) * ROUND)
        full = math.floor(min(rounds))
        return full * ROUND + self._whole([n - full * share for n, share in zip(counts, self.shares)])

    def _whole(self, counts: Sequence[int]) -> int:
        """How many tasks of one more round there are before a world runs out."""
        seen = [0] * len(counts)
        for i, k in enumerate(self.pattern):
            if seen[k] == counts[k]:
                return i
            seen[k] += 1
        return ROUND

    def get(self, split: str, i: int) -> Task:
        require_index(self.count(split), split, i)
        round_, place = divmod(i, ROUND)
        k = self.pattern[place]
        label = self.labels[k]
        world = self.worlds[label]
        index = round_ * self.shares[k] + self.pattern[:place].count(k)
        task = world.get(split, index % world.count(split))
        return replace(task, id=f"{label}/{task.id}", domain=f"{label}/{task.domain}")

    async def setup(self) -> None:
        for world in self.worlds.values():
            await world.setup()

    async def teardown(self) -> None:
        for world in self.worlds.values():
            await world.teardown()

    def make(self) -> MixedEnvironment:
        return MixedEnvironment(self.worlds)

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Message, ...]]:
        """From each world its share. Raises ConfigError where their tools differ: a demonstration is
        rendered with one set of tools."""
        tools = {label: repr(getattr(world, "tools", None)) for label, world in self.worlds.items()}
        if len(set(tools.values())) > 1:
            raise ConfigError(
                f"the worlds {', '.join(tools)} offer different tools, so their demonstrations cannot be "
                "mixed here; write them to a file with their tools, and give sft.data"
            )
        wanted = [self.pattern[i % ROUND] for i in range(count)]
        made = {
            k: iter(self.worlds[self.labels[k]].demonstrations(wanted.count(k), seed)) for k in set(wanted)
        }
        return [next(made[k]) for k in wanted]


class MixedEnvironment:
    """One episode: which world it is of, the task says."""

    def __init__(self, worlds: Mapping[str, CheckedWorld]) -> None:
        self.worlds = worlds
        self.inside: CheckedEnvironment | None = None

    @property
    def judges(self) -> bool:
        return self.inside is None or self.inside.judges

    async def reset(self, task: Task, *, seed: int) -> Reset:
        label, _, domain = task.domain.partition("/")
        await self.close()
        self.inside = self.worlds[label].make()
        own = replace(task, id=task.id.removeprefix(f"{label}/"), domain=domain)
        return await self.inside.reset(own, seed=seed)

    async def step(self, message: Message) -> Step:
        if self.inside is None:
            raise RuntimeError("step() before reset(): call reset(task, seed=0) first")
        return await self.inside.step(message)

    async def close(self) -> None:
        if self.inside is not None:
            inside, self.inside = self.inside, None
            await inside.close()


def interleaved(shares: Sequence[float], length: int) -> list[int]:
    """`length` indices in which each has its share, as evenly spread as possible (largest arrears first).

    >>> interleaved([0.5, 0.25, 0.25], 8)
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    owed = [0.0] * len(shares)
    out = []
    for _ in range(length):
        owed = [a + b for a, b in zip(owed, shares)]
        k = max(range(len(shares)), key=lambda j: (round(owed[j], 9), -j))
        owed[k] -= 1
        out.append(k)
    return out


def _read(entry: Any) -> tuple[str, CheckedWorld, float]:
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise ConfigError(f'a world of a mixture is a table such as {{ name = "calculator" }}; got {entry!r}')
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r} of a world.{nearest(unknown[0], _KEYS)} Known: {', '.join(_KEYS)}"
        )
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ConfigError(f"the weight of a world is a number above 0, such as 1; got {weight!r}")
    target, options = entry["name"], dict(entry.get("options", {}))
    if isinstance(target, str):
        world = load_world(target, deadline=_FOREVER, **options)
    else:
        world = as_world(target, deadline=_FOREVER, **options)
    label = str(entry.get("label") or (target.rpartition(":")[2] if isinstance(target, str) else world.name))
    if "/" in label:
        raise ConfigError(f"a label stands before the '/' of a domain and has none itself; got {label!r}")
    return label, world, float(weight)
