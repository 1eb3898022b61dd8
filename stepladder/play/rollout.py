"""The agent loop: a policy acts in an environment until the episode ends, and the record is data.

    reset -> prompt ids -> engine -> message -> step -> observation -> prompt ids -> ...

A failure of the world (a crashed sandbox, a deadline) ends its own episode and is recorded with its
boundary; it never counts as reward 0. A programming error ends the run at once with its traceback.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepladder.environments.checked import CheckedEnvironment, CheckedWorld
from stepladder.errors import BoundaryError, RewardError
from stepladder.play.agent import Agent, Agents
from stepladder.types import (
    Failure,
    Group,
    Message,
    Score,
    Step,
    StopReason,
    Task,
    TextPart,
    Tool,
    Trajectory,
)

Scorer = Callable[[Group], Awaitable[Group]]
Progress = Callable[[Trajectory], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may cost: turns, and tokens per observation; and how many are played at once."""

    max_turns: int = 8
    max_observation_tokens: int = 512
    concurrency: int = 256


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to be played: which task, which sibling, with which sampling seed.

    `key` orders its session in the engine.
    """

    key: str
    group_id: str
    index: int
    task: Task
    seed: int


def derive_seed(*parts: object) -> int:
    """Return a seed of 63 bits from anything printable: the same parts give the same seed everywhere.

    >>> derive_seed(0, "a") == derive_seed(0, "a"), derive_seed(0, "a") == derive_seed(0, "b")
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def rollout(
    agents: Agents,
    world: CheckedWorld,
    tasks: Sequence[tuple[str, Task]],
    *,
    group_size: int,
    limits: Limits,
    seed: int,
    scorer: Scorer | None = None,
    on_trajectory: Progress | None = None,
    key: str = "",
) -> list[Group]:
    """Play `group_size` episodes of every (group id, task); siblings differ in their sampling seed only.

    Returns one group per task, in order; failed episodes are in it, with `failure` set. They are played in
    waves of `limits.concurrency`. The engine admits sessions in the order of their keys, which begin with
    `key`: a loop that plays while it trains orders its groups by it.
    """
    requests = [
        EpisodeRequest(f"{key}{k * group_size + i:08d}", group_id, i, task, derive_seed(seed, group_id, i))
        for k, (group_id, task) in enumerate(tasks)
        for i in range(group_size)
    ]
    played: list[Trajectory] = []
    for start in range(0, len(requests), limits.concurrency):
        wave = requests[start : start + limits.concurrency]
        played += await _play_wave(agents, world, wave, limits, on_trajectory)
    groups = []
    for k, (group_id, task) in enumerate(tasks):
        group = Group(group_id, task, tuple(played[k * group_size : (k + 1) * group_size]))
        groups.append(await _scored(group, scorer))
    return groups


async def _play_wave(
    agents: Agents,
    world: CheckedWorld,
    wave: Sequence[EpisodeRequest],
    limits: Limits,
    on_trajectory: Progress | None,
) -> list[Trajectory]:
    """Play episodes at the same time. Where one raises, the others are cancelled and have cleaned up."""
    # Every agent of a wave exists before the first token: what an exact engine waits for.
    made: list[Agent] = []
    jobs: list[asyncio.Future[Trajectory]] = []
    try:
        for request in wave:
            made.append(agents(request.key))
        jobs += [
            asyncio.ensure_future(_play(agent, world, request, limits, on_trajectory))
            for agent, request in zip(made, wave)
        ]
        return list(await asyncio.gather(*jobs))
    except BaseException:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        raise
    finally:
        for agent in made:  # also those whose episode was cancelled before it began
            agent.close()


async def _play(
    agent: Agent, world: CheckedWorld, request: EpisodeRequest, limits: Limits, on_trajectory: Progress | None
) -> Trajectory:
    try:
        trajectory = await Episode(agent, world, request, limits).play()
    finally:
        agent.close()
    if on_trajectory is not None:
        on_trajectory(trajectory)
    return trajectory


class Episode:
    """The state of one episode while it is played."""

    def __init__(self, agent: Agent, world: CheckedWorld, request: EpisodeRequest, limits: Limits) -> None:
        self.agent, self.world, self.request, self.limits = agent, world, request, limits
        self.rewards: list[float | None] = []
        self.parts: dict[str, float | None] = {}
        self.info: dict[str, Any] = {}
        self.tools: tuple[Tool, ...] = ()
        self.judges = True

    async def play(self) -> Trajectory:
        """Play from reset to the record. Only programming errors and cancellation leave this function."""
        started = time.monotonic()
        failure: Failure | None = None
        stop: StopReason = "failed"
        environment: CheckedEnvironment | None = None
        try:
            environment = self.world.make()
            stop = await self._loop(environment)
        except BoundaryError as error:
            failure = Failure(_boundary(error), type(error).__name__, str(error))
        finally:
            if environment is not None:
                closing = await self._close(environment)
                failure = failure or closing
        if failure is not None:
            stop = "failed"
        return self._record(stop, failure, time.monotonic() - started)

    async def _loop(self, environment: CheckedEnvironment) -> StopReason:
        reset = await environment.reset(self.request.task, seed=self.request.task.seed)
        self.info.update(reset.info)
        self.tools = reset.tools
        self.judges = environment.judges
        self.agent.begin(reset.messages, reset.tools)
        for turn in range(self.limits.max_turns):
            act = await self.agent.act(derive_seed(self.request.seed, turn))
            if act.message is None:
                return "context"
            if act.finish_reason != "stop":
                # The message is not whole: nothing of it is executed or graded.
                self.rewards.append(0.0)
                return "context" if act.finish_reason == "context" else "length"
            step = await environment.step(act.message)
            self._take(step)
            if step.terminated:
                return "terminated"
            if step.truncated:
                return "truncated"
            if not step.messages:
                raise TypeError(
                    f"step() of {environment.name} gave no message and no end; return a message "
                    "for the model, or terminated=True"
                )
            if turn + 1 < self.limits.max_turns:
                self.agent.observe([self._cut(m) for m in step.messages])
        return "max_turns"

    async def _close(self, environment: CheckedEnvironment) -> Failure | None:
        try:
            await environment.close()
        except BoundaryError as error:
            return Failure("environment", type(error).__name__, str(error))
        return None

    def _take(self, step: Step) -> None:
        self.rewards.append(step.reward)
        for name, value in step.rewards.items():
            before = self.parts.get(name, 0.0)
            self.parts[name] = None if value is None or before is None else before + value
        self.info.update(step.info)

    def _cut(self, message: Message) -> Message:
        """Return an observation of at most `max_observation_tokens`, with a visible mark where it was cut."""
        if isinstance(message.content, str):
            return replace(message, content=self._cut_text(message.content))
        parts = [
            replace(part, text=self._cut_text(part.text)) if isinstance(part, TextPart) else part
            for part in message.content
        ]
        return replace(message, content=tuple(parts))

    def _cut_text(self, text: str) -> str:
        budget = self.limits.max_observation_tokens
        if len(text.encode(errors="replace")) <= budget:  # a token is at least one byte, so it fits
            return text
        kept, total = self.agent.cut(text, budget)
        if total <= budget:
            return text
        self.info["observations_cut"] = self.info.get("observations_cut", 0) + 1
        return f"{kept}\n... [cut: the first {budget} of {total} tokens]"

    def _record(self, stop: StopReason, failure: Failure | None, seconds: float) -> Trajectory:
        request = self.request
        identity = f"{request.group_id}/{request.index}"
        record = self.agent.record(identity, request.group_id)
        unscored = failure is not None or any(r is None for r in self.rewards)
        value = None if unscored else float(sum(r for r in self.rewards if r is not None))
        trajectory = Trajectory(
            id=identity,
            group_id=request.group_id,
            task=request.task,
            turns=record.turns,
            messages=record.messages,
            rewards=tuple(self.rewards),
            score=Score(value, dict(self.parts)),
            stop_reason=stop,
            failure=failure,
            seconds=seconds,
            samples=record.samples,
            info=dict(self.info),
            tools=self.tools,
        )
        return with_success(trajectory) if self.judges else trajectory


def with_success(trajectory: Trajectory) -> Trajectory:
    """Settle `success` where it is open: by `info["success"]` where a step gave it, else by the score."""
    if trajectory.failure is not None or trajectory.success is not None:
        return trajectory
    said = trajectory.info.get("success", trajectory.score.succeeded)
    return replace(trajectory, success=bool(said))


async def _scored(group: Group, scorer: Scorer | None) -> Group:
    """Return the finished group as the recipe's rewards score it; a scorer that fails leaves it unscored.

    Where the environment did not judge the episodes, it is settled here what they amount to.
    """
    try:
        group = group if scorer is None else await scorer(group)
        return replace(group, trajectories=tuple(map(with_success, group.trajectories)))
    except RewardError as error:
        failure = Failure("reward", type(error).__name__, str(error))
        return replace(
            group,
            trajectories=tuple(
                replace(t, score=Score(None, t.score.parts), failure=t.failure or failure)
                for t in group.trajectories
            ),
        )


def _boundary(error: BoundaryError) -> Any:
    return error.boundary if error.boundary != "unknown" else "environment"
