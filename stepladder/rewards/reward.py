"""Reward functions that see finished episodes, after the environment's own reward.

Three styles are told apart by their first parameter:

    def exact(answer: str, task: Task) -> float | None | Score       # one episode's final text
    def short(trajectory: Trajectory) -> float | None | Score        # one whole episode
    def ranked(completions, prompts, **columns) -> list[float | None]  # TRL's: the whole group at once
    def batched(trajectories: list[Trajectory]) -> list[float | None]  # the same, as our records

None means "could not be scored", never 0. Every function may be async. A process reward (a model that judges
steps, a judge that reads turn by turn) is the second style and answers with a list, one number for each turn.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stepladder.boundary import shown, to_score
from stepladder.deadlines import guarded
from stepladder.errors import ConfigError, RewardError, nearest
from stepladder.plugins import load_object
from stepladder.types import Failure, Group, Score, Trajectory

Style = Literal["answer", "trajectory", "group"]
_FIRST: dict[str, Style] = {
    "answer": "answer",
    "trajectory": "trajectory",
    "completions": "group",
    "trajectories": "group",
}


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its name, its style, and how many seconds one call may take."""

    name: str
    function: Callable[..., Any]
    style: Style
    deadline: float = 60.0


def as_reward(target: Any, *, name: str | None = None, deadline: float = 60.0) -> Reward:
    """A Reward from a function, an object with `__call__`, or an import path such as "rewards.py:exact".

    Raises ConfigError where the first parameter is none of answer, trajectory, completions (prompts may
    come before completions, as in TRL).
    """
    if isinstance(target, Reward):
        return target if name is None else replace(target, name=name)
    if isinstance(target, str):
        name = name or target.rpartition(":")[2]
        target = load_object(target, what="reward")
    if isinstance(target, type) or not callable(target):
        raise ConfigError(f"{shown(target)} is no reward function; give a function such as f(answer, task)")
    name = name or str(getattr(target, "__name__", type(target).__name__))
    parameters = list(inspect.signature(target).parameters)
    style = _FIRST.get(parameters[0]) if parameters else None
    if style is None and "completions" in parameters:
        style = "group"
    if style is None:
        raise ConfigError(
            f"reward {name} takes ({', '.join(parameters)}); its first parameter must be called 'answer' "
            f"(with an optional 'task'), 'trajectory', or 'completions'."
            f"{nearest(parameters[0], _FIRST) if parameters else ''}"
        )
    if style == "answer" and (unknown := [p for p in parameters[1:] if p != "task"]):
        raise ConfigError(
            f"reward {name} takes {unknown[0]!r}; an answer reward takes (answer) or (answer, task)"
        )
    return Reward(name, target, style, deadline)


async def score_group(
    group: Group,
    rewards: Sequence[Reward | Callable[..., Any] | str],
    weights: Sequence[float] | None = None,
    *,
    environment_weight: float = 1.0,
) -> Group:
    """The group with each score = environment_weight * environment's + sum of weight_i * reward_i.

    Parts hold the environment's own parts and every reward, unweighted, under its name. weights: one per
    reward, all 1 by default; environment_weight 0 leaves the environment out.

    A reward that answers None for every episode of the group does not apply and is left out. One that
    scores some of them and not others leaves those others unscored (None): their sums could not be compared.
    So does an environment that could not score. Episodes with a failure are not shown to any function.

    A function that raises or passes its deadline leaves its episodes unscored, with the failure recorded.
    One that returns the wrong number of rewards, no numbers, or NaN raises RewardError.
    """
    functions = [as_reward(reward) for reward in rewards]
    weights = [1.0] * len(functions) if weights is None else list(weights)
    _check(functions, weights, group)
    ended = [i for i, trajectory in enumerate(group.trajectories) if trajectory.failure is None]
    trajectories = list(group.trajectories)
    columns: list[tuple[Reward, float, dict[int, Score]]] = []
    for function, weight in zip(functions, weights, strict=True):
        scores, failures = await _scores(function, [(i, group.trajectories[i]) for i in ended])
        for i, failure in failures.items():
            trajectories[i] = replace(trajectories[i], failure=trajectories[i].failure or failure)
        columns.append((function, weight, scores))
    applying = [column for column in columns if any(s.value is not None for s in column[2].values())]
    for i in ended:
        total = _combined(i, group.trajectories[i].score, environment_weight, applying)
        if trajectories[i].failure is not None:
            total = None
        trajectories[i] = replace(
            trajectories[i],
            score=_named(i, group.trajectories[i].score, columns, total),
            rewards=_per_turn(i, group.trajectories[i], environment_weight, applying),
        )
    return replace(group, trajectories=tuple(trajectories))


def _check(functions: Sequence[Reward], weights: Sequence[float], group: Group) -> None:
    if len(weights) != len(functions):
        raise ConfigError(
            f"{len(weights)} weights for {len(functions)} rewards ({', '.join(f.name for f in functions)}); "
            "give one weight for each"
        )
    names = [function.name for function in functions]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(
            f"two rewards are called {twice[0]!r}; give one another name, as_reward(f, name='...')"
        )
    taken = {part for trajectory in group.trajectories for part in trajectory.score.parts}
    if taken.intersection(names):
        raise ConfigError(
            f"the environment has a reward part called {min(taken.intersection(names))!r} already; give the "
            "reward function another name, as_reward(f, name='...')"
        )


def _combined(
    i: int,
    environment: Score,
    environment_weight: float,
    applying: Sequence[tuple[Reward, float, dict[int, Score]]],
) -> float | None:
    """The weighted sum for episode `i`, or None where a term that applies is missing."""
    terms = [weight * value for _, weight, scores in applying if (value := scores[i].value) is not None]
    if len(terms) < len(applying):
        return None
    if environment_weight == 0.0:
        return sum(terms) if terms else None
    return None if environment.value is None else environment_weight * environment.value + sum(terms)


def _per_turn(
    i: int,
    trajectory: Trajectory,
    environment_weight: float,
    columns: Sequence[tuple[Reward, float, dict[int, Score]]],
) -> tuple[float | None, ...]:
    """The rewards of the turns with the process rewards among them, weighted as in the score."""
    turns = [None if r is None else environment_weight * r for r in trajectory.rewards]
    for reward, weight, scores in columns:
        given = scores[i].turns
        if given and len(given) != len(trajectory.turns):
            raise RewardError(
                f"reward {reward.name} returned {len(given)} numbers for an episode of "
                f"{len(trajectory.turns)} turns; return one for each turn, or a single one for the episode"
            )
        turns += [0.0] * (len(given) - len(turns))
        turns = [r if r is None or k >= len(given) else r + weight * given[k] for k, r in enumerate(turns)]
    return tuple(turns)


def _named(
    i: int, environment: Score, columns: Sequence[tuple[Reward, float, dict[int, Score]]], total: float | None
) -> Score:
    parts: dict[str, float | None] = dict(environment.parts)
    notes = [environment.explanation]
    for reward, _, scores in columns:
        score = scores[i]
        parts[reward.name] = score.value
        parts.update({f"{reward.name}/{part}": value for part, value in score.parts.items()})
        notes.append(f"{reward.name}: {score.explanation}" if score.explanation else "")
    return Score(total, parts, "\n".join(note for note in notes if note))


async def _scores(
    reward: Reward, items: Sequence[tuple[int, Trajectory]]
) -> tuple[dict[int, Score], dict[int, Failure]]:
    """A score for each index, and the failures of those for which the function broke."""
    unscored = {i: Score(None) for i, _ in items}
    if not items:
        return {}, {}
    if reward.style == "group":
        try:
            return await _whole_group(reward, items), {}
        except _CallFailed as error:
            return unscored, {i: error.failure for i, _ in items}
    outcomes = await asyncio.gather(*(_one(reward, trajectory) for _, trajectory in items))
    scores, failures = unscored, dict[int, Failure]()
    for (i, _), outcome in zip(items, outcomes, strict=True):
        if isinstance(outcome, Failure):
            failures[i] = outcome
        else:
            scores[i] = outcome
    return scores, failures


class _CallFailed(Exception):
    """The function raised or hung; `failure` says how."""

    def __init__(self, error: RewardError) -> None:
        super().__init__(str(error))
        self.failure = Failure("reward", type(error.__cause__ or error).__name__, str(error))


async def _call(reward: Reward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return await guarded(
            reward.function,
            args,
            kwargs,
            f"reward {reward.name}",
            deadline=reward.deadline,
            error_class=RewardError,
        )
    except RewardError as error:
        raise _CallFailed(error) from error


async def _one(reward: Reward, trajectory: Trajectory) -> Score | Failure:
    args: tuple[Any, ...] = (trajectory,)
    kwargs: dict[str, Any] = {}
    if reward.style == "answer":
        args = (final_answer(trajectory),)
        if "task" in inspect.signature(reward.function).parameters:
            kwargs = {"task": trajectory.task}
    try:
        value = await _call(reward, args, kwargs)
    except _CallFailed as error:
        return error.failure
    return to_score(value, where=f"reward {reward.name}", turns=True)


def final_answer(trajectory: Trajectory) -> str:
    """The text of the last assistant message, or an empty string."""
    said = [message.text for message in trajectory.messages if message.role == "assistant"]
    return said[-1] if said else ""


async def _whole_group(reward: Reward, items: Sequence[tuple[int, Trajectory]]) -> dict[int, Score]:
    values = await _call(reward, (), group_columns(reward, [trajectory for _, trajectory in items]))
    # tensors and arrays come as one object with tolist()
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise RewardError(
            f"reward {reward.name} returned {shown(values)}; return a list with one reward for each "
            f"of the {len(items)} completions"
        )
    if len(values) != len(items):
        raise RewardError(
            f"reward {reward.name} returned {len(values)} rewards for {len(items)} completions; return one "
            "for each, in order (None for one that cannot be scored)"
        )
    return {
        i: to_score(value, where=f"reward {reward.name}, completion {position},")
        for position, ((i, _), value) in enumerate(zip(items, values, strict=True))
    }


def group_columns(reward: Reward, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """TRL's arguments, one entry per completion: chat-format `prompts` and `completions` (everything after
    the prompt, tool messages included), `completion_ids` (what the policy sampled), and the task's columns:
    `reference`, `domain`, `id` and every key of `Task.data`. Only what the function takes is passed.
    """
    tasks = [trajectory.task for trajectory in trajectories]
    # An environment may open with other messages than the task's: what precedes the policy is the prompt.
    cut = [(t.messages, prompt_length(t)) for t in trajectories]
    columns: dict[str, list[Any]] = {key: [task.data.get(key) for task in tasks] for key in tasks[0].data}
    columns |= {
        "reference": [task.reference for task in tasks],
        "domain": [task.domain for task in tasks],
        "id": [task.id for task in tasks],
        "prompts": [[m.to_dict() for m in messages[:n]] for messages, n in cut],
        "completions": [[m.to_dict() for m in messages[n:]] for messages, n in cut],
        "trajectories": list(trajectories),
        "completion_ids": [[i for turn in t.turns for i in turn.token_ids] for t in trajectories],
    }
    parameters = inspect.signature(reward.function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    for parameter in parameters:
        if parameter.name not in columns and parameter.default is parameter.empty:
            raise ConfigError(
                f"reward {reward.name} asks for the column {parameter.name!r}, which the tasks do not have."
                f"{nearest(parameter.name, columns)} They have: {', '.join(sorted(columns))}"
            )
    return {p.name: columns[p.name] for p in parameters if p.name in columns}


def prompt_length(trajectory: Trajectory) -> int:
    """How many of the messages came before the policy's first."""
    said = [i for i, message in enumerate(trajectory.messages) if message.role == "assistant"]
    # Assistant messages of the task itself are part of the prompt (few-shot examples).
    own = sum(message.role == "assistant" for message in trajectory.task.messages)
    return said[own] if len(said) > own else len(trajectory.messages)
