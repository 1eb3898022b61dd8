"""What is added to a score for form: bonuses for tools and formats, and a penalty for turns near their limit.

Shaping comes after the episode and after the choice of groups. Each term is a part of the score under its
own name, and stands at the turn that earned it, so that credit by turns sees it there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepladder.recipe.rl_credit import BonusSection
from stepladder.types import Group, Message, Score, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """The terms as they stand at one step: weights already annealed.

    overlong: weight of the soft punishment of a turn longer than `limit` - `buffer` sampled tokens.
    """

    bonuses: Sequence[tuple[BonusSection, float]] = ()
    overlong: float = 0.0
    limit: int = 0
    buffer: float = 0.0


def annealed(bonus: BonusSection, step: int, tool_rate: float) -> float:
    """w = w0·max(0, 1 - step/T)·max(0, 1 - rate/τ): both fall in a straight line, and stay at 0.

    >>> annealed(BonusSection(kind="tool", weight=0.2, anneal_steps=10), 5, 0.0)
    0.1
    """
    weight = bonus.weight
    if bonus.anneal_steps is not None:
        weight *= max(0.0, 1 - step / bonus.anneal_steps)
    if bonus.until_tool_rate is not None:
        weight *= max(0.0, 1 - tool_rate / bonus.until_tool_rate)
    return weight


def shaped(groups: Sequence[Group], rules: Shaping) -> list[Group]:
    """The groups with the terms in their scores. What failed or could not be scored is left as it is."""
    if not rules.bonuses and not rules.overlong:
        return list(groups)
    return [replace(g, trajectories=tuple(_shaped(t, rules) for t in g.trajectories)) for g in groups]


def overlong(tokens: int, limit: int, buffer: float) -> float:
    """DAPO's soft punishment (arXiv:2503.14476): 0 up to limit - buffer, then falling to -1 at the limit.

    >>> overlong(90, 100, 20), overlong(80, 100, 20), overlong(120, 100, 20)
    (-0.5, 0.0, -1.0)
    """
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def _shaped(trajectory: Trajectory, rules: Shaping) -> Trajectory:
    score = trajectory.score
    worth = score.value
    if trajectory.failure is not None or worth is None or not trajectory.turns:
        return trajectory
    per_turn = [0.0] * len(trajectory.turns)
    parts: dict[str, float] = {}
    for bonus, weight in rules.bonuses:
        earned = _earned(trajectory, bonus, weight)
        name = f"{bonus.kind}_bonus"
        parts[name] = parts.get(name, 0.0) + sum(earned)
        per_turn = [a + b for a, b in zip(per_turn, earned, strict=True)]
    if rules.overlong:
        lengths = [len(turn.token_ids) for turn in trajectory.turns]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        penalty = rules.overlong * overlong(lengths[longest], rules.limit, rules.buffer)
        parts["overlong"] = penalty
        per_turn[longest] += penalty
    return replace(
        trajectory,
        score=Score(worth + sum(per_turn), {**score.parts, **parts}, score.explanation),
        rewards=_added(trajectory.rewards, per_turn),
    )


def _earned(trajectory: Trajectory, bonus: BonusSection, weight: float) -> list[float]:
    """What each turn earns. The cap is reached by the early calls; later ones earn nothing."""
    said = [m for m in trajectory.messages if m.role == "assistant"][-len(trajectory.turns) :]
    nothing = [0.0] * len(said)
    if bonus.only_solved and not trajectory.solved:
        return nothing
    if bonus.kind == "format":
        fits = not trajectory.truncated and not any(_malformed(m) for m in said)
        if fits and re.search(bonus.pattern, _raw(said[-1])):
            nothing[-1] = weight
        return nothing
    if bonus.pattern:
        calls = [len(re.findall(bonus.pattern, _raw(m))) for m in said]
    else:
        calls = [sum(call.error is None for call in m.tool_calls) for m in said]
    if bonus.per == "episode":
        first = next((k for k, n in enumerate(calls) if n), None)
        return [weight if k == first else 0.0 for k in range(len(said))]
    room = float("inf") if bonus.cap is None else bonus.cap
    sign = -1.0 if weight < 0 else 1.0
    for k, n in enumerate(calls):
        paid = min(abs(weight) * n, room)
        room -= paid
        nothing[k] = sign * paid
    return nothing


def _raw(message: Message) -> str:
    return message.raw if message.raw is not None else message.text


def _malformed(message: Message) -> bool:
    return any(call.error is not None for call in message.tool_calls)


def _added(rewards: Sequence[float | None], per_turn: Sequence[float]) -> tuple[float | None, ...]:
    longer = [*rewards, *[0.0] * (len(per_turn) - len(rewards))]
    more = [*per_turn, *[0.0] * (len(longer) - len(per_turn))]
    return tuple(None if r is None else r + x for r, x in zip(longer, more, strict=True))
