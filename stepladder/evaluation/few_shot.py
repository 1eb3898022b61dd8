"""Worked examples before every task: is training needed at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepladder.environments.checked import CheckedEnvironment, CheckedWorld
from stepladder.types import Message, Reset, Task


class WithExamples(CheckedWorld):
    """A world whose every prompt is preceded by worked examples."""

    def __init__(self, world: CheckedWorld, examples: Sequence[Sequence[Message]]) -> None:
        super().__init__(world.inner, world.deadline)
        self.examples = [m for example in examples for m in example if m.role != "system"]

    def make(self) -> CheckedEnvironment:
        return _ExampleEnvironment(super().make(), self.examples)


class _ExampleEnvironment(CheckedEnvironment):
    def __init__(self, environment: CheckedEnvironment, examples: list[Message]) -> None:
        super().__init__(environment.inner, environment.name, environment._deadline)
        self.examples = examples

    async def reset(self, task: Task, *, seed: int) -> Reset:
        reset = await super().reset(task, seed=seed)
        head = [m for m in reset.messages[:1] if m.role == "system"]
        rest = reset.messages[len(head) :]
        return replace(reset, messages=(*head, *self.examples, *rest))
