"""Conversations to imitate, as training samples: from a file, or made by the environment."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.datasets import read_dataset
from stepladder.sections.sft import SftSection
from stepladder.training.setup import Workbench
from stepladder.types import Message, Tool, TrainingSample

Conversation = tuple[Sequence[Message], Sequence[Tool]]


def sft_samples(
    bench: Workbench, settings: SftSection, *, seed: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """(training, validation) samples; the two hold no conversation in common."""
    train, held = sft_conversations(bench, settings, seed=seed)
    return rendered(bench, settings, train, "demo"), rendered(bench, settings, held, "held")


def sft_conversations(
    bench: Workbench, settings: SftSection, *, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation) conversations with their tools.

    That the world makes demonstrations and the file has enough of them, `check_world` has seen to.
    """
    if settings.data is not None:
        records = read_dataset(settings.data, "demonstration").records
        rows: list[Conversation] = [(r.messages, r.tools) for r in records]
        cut = len(rows) - settings.validation
        return rows[:cut], rows[cut:]
    make = bench.world.demonstrations
    tools = opening_tools(bench)
    train = make(settings.demonstrations, seed)
    shown = {_key(c) for c in train}
    # The held-out ones come from the same families; a conversation that is in both is left out.
    held = [c for c in make(settings.validation, seed + 1) if _key(c) not in shown]
    return [(c, tools) for c in train], [(c, tools) for c in held]


def rendered(
    bench: Workbench, settings: SftSection, rows: Sequence[Conversation], name: str
) -> list[TrainingSample]:
    """The samples of conversations; those of row i have the trajectory id NAME-i."""
    samples: list[TrainingSample] = []
    for i, (messages, tools) in enumerate(rows):
        key = f"{name}-{i}"
        samples += bench.renderer.demonstration(
            messages, tools, trajectory_id=key, group_id=key, train=settings.train
        )
    return samples


def opening_tools(bench: Workbench) -> tuple[Tool, ...]:
    """The tools that an episode of this world begins with, found by beginning one."""
    world = bench.world
    split = "train" if "train" in world.splits() else next(iter(world.splits()))
    task = world.get(split, 0)
    environment = world.make()

    async def look() -> tuple[Tool, ...]:
        reset = await environment.reset(task, seed=task.seed)
        await environment.close()
        return reset.tools

    return bench.runner.run(look())


def _key(conversation: Sequence[Message]) -> str:
    return repr([(m.role, m.text) for m in conversation])
