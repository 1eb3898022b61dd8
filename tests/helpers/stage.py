"""A scripted model and a small world, for the tests of the agent loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.engines.scripted import ScriptedEngine
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, Scorer, rollout
from stepladder.types import Group, Message, Reset, Step, Task, Trajectory

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'


class Stage:
    """A scripted model: what each session says, turn by turn, as text."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.renderer = Renderer(self.tokenizer)
        self.end = self.tokenizer.eos_token_id

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), *([self.end] if end else [])]

    def says(self, *turns: str, **settings: Any) -> ScriptedEngine:
        """Every session says `turns` in order."""
        return ScriptedEngine(lambda request: self.ids(turns[request.turn]), **settings)

    def play(
        self,
        engine: Any,
        world: Any,
        *,
        tasks: int = 1,
        group_size: int = 1,
        split: str = "train",
        max_tokens: int = 400,
        max_context: int = 4000,
        seed: int = 0,
        scorer: Scorer | None = None,
        **limits: Any,
    ) -> list[Group]:
        agents = policy_agents(
            engine, self.renderer, temperature=1.0, max_tokens=max_tokens, max_context=max_context
        )
        return asyncio.run(
            rollout(
                agents,
                world,
                [(f"g{i}", world.get(split, i)) for i in range(tasks)],
                group_size=group_size,
                limits=Limits(**limits),
                seed=seed,
                scorer=scorer,
            )
        )

    def one(self, engine: Any, world: Any, **settings: Any) -> Trajectory:
        return self.play(engine, world, **settings)[0].trajectories[0]


class Base:
    """Ends after `turns` answers, each worth 1."""

    inline = True
    turns = 2
    tasks = staticmethod(lambda split: [{"prompt": f"{i}?", "seed": 100 + i} for i in range(8)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.said: list[str] = []
        return Reset(task.messages, info={"seed": seed})

    async def step(self, message: Message) -> Step:
        self.said.append(message.text)
        done = len(self.said) == self.turns
        return Step(() if done else (Message("user", "go on"),), reward=1.0, terminated=done)

    async def close(self) -> None:
        pass


def texts(trajectory: Trajectory, role: str) -> list[str]:
    return [m.text for m in trajectory.messages if m.role == role]


def breaking(phase: str, error: BaseException, *, only: Sequence[int] = (1,)) -> type:
    """A world whose episodes `only` (by their order of reset, from 0) raise `error` in `phase`."""

    class Breaking(Base):
        count = 0
        closed = 0

        async def reset(self, task: Task, *, seed: int) -> Reset:
            self.mine = type(self).count
            type(self).count += 1
            self._maybe("reset")
            return await super().reset(task, seed=seed)

        async def step(self, message: Message) -> Step:
            self._maybe("step")
            return await super().step(message)

        async def close(self) -> None:
            type(self).closed += 1
            self._maybe("close")

        def _maybe(self, now: str) -> None:
            if now == phase and self.mine in only:
                raise error

    return Breaking
