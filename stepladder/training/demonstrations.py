"""Conversations to imitate, as training samples: from a file, or made by the environment."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from stepladder.config import SftSection
from stepladder.data.datasets import read_conversations
from stepladder.errors import ConfigError, DataError
from stepladder.training.setup import Workbench
from stepladder.types import Message, Tool, TrainingSample


def sft_samples(
    bench: Workbench, settings: SftSection, *, seed: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """(training, validation) samples; the two hold no conversation in common.

    Raises ConfigError where the environment makes none, DataError where nothing is left to train on.
    """
    if settings.data is not None:
        rows = [(r.messages, r.tools) for r in read_conversations(settings.data)]
        if len(rows) <= settings.validation:
            raise DataError(
                f"{settings.data} has {len(rows)} conversations, sft.validation holds back "
                f"{settings.validation}; try sft.validation = {max(0, len(rows) // 5)}"
            )
        cut = len(rows) - settings.validation
        train, held = rows[:cut], rows[cut:]
    else:
        make = getattr(bench.world, "demonstrations", None)
        if make is None:
            raise ConfigError(
                f"sft.demonstrations asks the environment {bench.recipe.environment.name!r} for "
                "demonstrations, but it has no demonstrations(count, seed) method; add one, or give sft.data"
            )
        tools = opening_tools(bench)
        train = [(c, tools) for c in make(settings.demonstrations, seed)]
        shown = {_key(c) for c, _ in train}
        # The held-out ones come from the same families; a conversation that is in both is left out.
        held = [(c, tools) for c in make(settings.validation, seed + 1) if _key(c) not in shown]
    render = bench.renderer.demonstration
    return (
        [s for i, (c, t) in enumerate(train) for s in render(c, t, trajectory_id=f"demo-{i}", group_id=f"demo-{i}", train=settings.train)],
        [s for i, (c, t) in enumerate(held) for s in render(c, t, trajectory_id=f"held-{i}", group_id=f"held-{i}", train=settings.train)],
    )


def opening_tools(bench: Workbench) -> tuple[Tool, ...]:
    """The tools that an episode of this world begins with, found by beginning one."""
    world = bench.world
    split = "train" if "train" in world.splits() else next(iter(world.splits()))
    task = world.get(split, 0)
    environment = world.make()

    async def look() -> Any:
        reset = environment.reset(task, seed=task.seed)
        reset = await reset if inspect.isawaitable(reset) else reset
        closed = environment.close()
        if inspect.isawaitable(closed):
            await closed
        return reset

    tools: tuple[Tool, ...] = bench.runner.run(look()).tools
    return tools


def _key(conversation: Sequence[Message]) -> str:
    return repr([(m.role, m.text) for m in conversation])
