"""Labels of steps by Monte Carlo rollouts (Math-Shepherd, arXiv:2312.08935).

The policy solves training tasks. From the end of each step of a solution it then completes the solution
`completions` times, in the same environment, and the step's label says how often that ended right. The last
step's label is whether the solution itself was right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepladder.data.chat.renderer import Renderer
from stepladder.data.files.records import Steps
from stepladder.engines.engine import Engine
from stepladder.errors import DataError
from stepladder.objectives.reward_model import math_shepherd_label
from stepladder.play.agent import Act, Agent, Agents
from stepladder.play.policy_agent import PolicyAgent
from stepladder.recipe.process_reward_model import MonteCarloSection, ProcessRewardModelSection
from stepladder.types import Generation, Sampling, Task, Trajectory
from stepladder.workbench.bench import Workbench

log = logging.getLogger("stepladder")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A solution up to the end of step `step`: the ids that were sampled, never encoded again."""

    solution: int
    step: int
    ids: tuple[int, ...]


class PrefixAgent(PolicyAgent):
    """Answers its first turn from where `prefix` ends, as if it had said that itself."""

    def __init__(self, *arguments: Any, prefix: tuple[int, ...], **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self.prefix = prefix

    async def act(self, seed: int) -> Act:
        if not self.prefix:
            return await super().act(seed)
        assert self.conversation is not None
        prompt = self.conversation.prompt_ids + self.prefix
        room = min(self.max_tokens - len(self.prefix), self.max_context - len(prompt))
        if room < 1:
            return Act(None, "context")
        stops = tuple(self.renderer.stop_token_ids)
        sampling = Sampling(self.temperature, room, stops, seed)
        made = await self.session.generate(prompt, sampling)
        given, self.prefix = self.prefix, ()
        whole = Generation(
            given + made.token_ids,
            (0.0,) * len(given) + made.logprobs,
            ((made.versions[0][0], len(given)), *made.versions),
            made.finish_reason,
        )
        return Act(self.conversation.add_turn(whole, sampling), made.finish_reason)


def prefix_agents(
    engine: Engine,
    renderer: Renderer,
    prefixes: Sequence[Prefix],
    completions: int,
    *,
    temperature: float,
    max_tokens: int,
    max_context: int,
) -> Agents:
    """Return agents for episodes of one task per prefix with `group_size=completions`, in that order."""

    def make(key: str) -> Agent:
        return PrefixAgent(
            engine.session(key),
            renderer,
            temperature=temperature,
            max_tokens=max_tokens,
            max_context=max_context,
            prefix=prefixes[int(key) // completions].ids,
        )

    return make


def monte_carlo_steps(bench: Workbench, settings: ProcessRewardModelSection, *, seed: int) -> list[Steps]:
    """Return solutions of the first training tasks, sampled from the policy, with labelled steps.

    What cannot be labelled (a failed episode, several turns, completions that all failed) is counted and
    said. Raises DataError where nothing is left.
    """
    how, r = settings.monte_carlo, bench.recipe.rollout
    assert how is not None
    tasks = [bench.world.get("train", i) for i in range(how.tasks)]
    groups = bench.play(
        [(f"solve-{i}", task) for i, task in enumerate(tasks)],
        group_size=how.solutions_per_task,
        seed=seed,
    )
    played = [t for group in groups for t in group.trajectories]
    solutions = [t for t in played if _usable(t)]
    cuts = [step_cuts(bench.renderer.decode, t, settings.separator) for t in solutions]
    prefixes = [
        Prefix(i, k, solutions[i].turns[0].token_ids[:cut])
        for i, ends in enumerate(cuts)
        for k, cut in enumerate(ends)
    ]
    labels = _labels(bench, how, solutions, prefixes, seed=seed)
    rows, unlabelled = [], 0
    for i, trajectory in enumerate(solutions):
        own = [labels[i, k] for k in range(len(cuts[i]))]
        if any(label is None for label in own):
            unlabelled += 1
            continue
        steps = split_steps(trajectory.messages[-1].text, settings.separator)
        known = [label for label in own if label is not None]
        prompt = trajectory.messages[:-1]
        rows.append(Steps(prompt, tuple(steps), (*known, float(trajectory.solved))))
    skipped = len(played) - len(solutions)
    if skipped or unlabelled:
        log.warning(
            "of %d solutions %d were left out (failed, cut, empty or of several turns), and %d whose "
            "completions all failed at some step",
            len(played),
            skipped,
            unlabelled,
        )
    if not rows:
        raise DataError(
            f"none of the {len(played)} solutions that were sampled can be labelled; each must be one "
            f"answer that ends by itself (rollout.max_tokens={r.max_tokens}), with steps that "
            f"{settings.separator!r} separates"
        )
    return rows


def _labels(
    bench: Workbench,
    how: MonteCarloSection,
    solutions: Sequence[Trajectory],
    prefixes: Sequence[Prefix],
    *,
    seed: int,
) -> dict[tuple[int, int], float | None]:
    """The label of each (solution, step) by completions; None where all of them failed."""
    r, n = bench.recipe.rollout, how.completions
    tasks: list[tuple[str, Task]] = [
        (f"step-{p.solution}-{p.step}", solutions[p.solution].task) for p in prefixes
    ]
    assert isinstance(bench.renderer, Renderer)
    agents = prefix_agents(
        bench.engine,
        bench.renderer,
        prefixes,
        n,
        temperature=r.temperature,
        max_tokens=r.max_tokens,
        max_context=r.max_context,
    )
    groups = bench.play(tasks, agents=agents, group_size=n, seed=seed + 1)
    labels: dict[tuple[int, int], float | None] = {}
    for prefix, group in zip(prefixes, groups, strict=True):
        right = [t.solved for t in group.trajectories if t.failure is None]
        soft = how.labels == "soft"
        label = math_shepherd_label(right, soft=soft) if right else None
        labels[prefix.solution, prefix.step] = label
    return labels


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a solution, without empty ones.

    >>> split_steps("a\\n\\nb\\n", "\\n")
    ['a', 'b']
    """
    return [step.strip() for step in text.split(separator) if step.strip()]


def step_cuts(decode: Callable[[Sequence[int]], str], trajectory: Trajectory, separator: str) -> list[int]:
    """How many sampled ids each step but the last takes, with its separator where that is a token's end."""
    ids = trajectory.turns[0].token_ids
    total = len(split_steps(trajectory.messages[-1].text, separator))
    cuts: list[int] = []
    for m in range(1, len(ids) + 1):
        if len(cuts) == total - 1:
            break
        whole, _, rest = decode(ids[:m]).rpartition(separator)
        if len(split_steps(whole, separator)) > len(cuts):
            cuts.append(m - 1 if rest else m)  # a token that begins the next step too belongs to that
    return cuts


def _usable(trajectory: Trajectory) -> bool:
    one_answer = len(trajectory.turns) == 1 and trajectory.messages[-1].role == "assistant"
    return (
        trajectory.failure is None
        and not trajectory.truncated
        and one_answer
        and bool(trajectory.messages[-1].text.strip())
    )
