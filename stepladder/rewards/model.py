"""Learned rewards: reward models and process reward models, one or several, as reward functions.

What runs the networks is handed in (`policies.conversation_scorer.ConversationScorer` fits), so that this
module knows no tensors. In a recipe:

    [environment]
    rewards = ["reward_model:runs/rm/reward_model"]
    rewards = ["reward_model:a/reward_model,b/reward_model?combine=mean-std"]
    rewards = ["process_reward_model:runs/prm/process_reward_model?aggregation=min"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, get_args

from stepladder.errors import ConfigError, nearest
from stepladder.types import Message, Score, Trajectory

Combine = Literal["mean", "min", "mean-std"]
Conversations = Sequence[Sequence[Message]]


class OutcomeScorer(Protocol):
    """One reward model. `mean` and `std` are those of its raw scores on its training data."""

    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float: ...
    def scores(self, conversations: Conversations) -> list[float | None]: ...


class StepScorer(Protocol):
    """One process reward model: log P(right) of each step of the last answer."""

    def step_logprobs(self, conversations: Conversations) -> list[tuple[float, ...] | None]: ...


def combined(values: Sequence[float], combine: Combine) -> float:
    """One number from those of an ensemble's members; the standard deviation is the population's.

    min and mean-std are the pessimistic ones: where the members disagree nothing can be gained (Coste et al.
    2023, arXiv:2310.02743, where mean-std is called uncertainty-weighted).

    >>> combined([1.0, 3.0], "mean"), combined([1.0, 3.0], "min"), combined([1.0, 3.0], "mean-std")
    (2.0, 1.0, 1.0)
    """
    if combine == "min":
        return min(values)
    mean = math.fsum(values) / len(values)
    if combine == "mean":
        return mean
    return mean - math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


class RewardModel:
    """Scores finished conversations with one reward model or an ensemble; a reward function of whole groups.

    `normalise` subtracts each member's mean and divides by its standard deviation, which an ensemble needs:
    the offset and the scale of a Bradley-Terry model mean nothing. A conversation that a member cannot score
    is None.
    """

    def __init__(
        self, members: Sequence[OutcomeScorer], *, combine: Combine = "mean", normalise: bool = True
    ) -> None:
        _check(members, combine)
        flat = [i for i, member in enumerate(members) if not member.std > 0]
        if normalise and flat:
            raise ConfigError(
                f"reward model {flat[0]} gave every training row the same score (std "
                f"{members[flat[0]].std}), so its scores cannot be normalised: it has learnt nothing. Train "
                "it longer, or use raw scores (normalise=False, in a recipe ?normalise=false)"
            )
        self.members, self.combine, self.normalise = tuple(members), combine, normalise

    def scores(self, conversations: Conversations) -> list[float | None]:
        """One number each, in order: for best-of-n, or for anything else that ranks answers."""
        return [score.value for score in self.explained(conversations)]

    def explained(self, conversations: Conversations) -> list[Score]:
        """With the members' own scores as parts, where there are several."""
        columns = [self._column(member, conversations) for member in self.members]
        out = []
        for values in zip(*columns, strict=True):
            known = [value for value in values if value is not None]
            total = combined(known, self.combine) if len(known) == len(values) else None
            parts = {f"member{i}": value for i, value in enumerate(values)} if len(values) > 1 else {}
            out.append(Score(total, parts))
        return out

    def _column(self, member: OutcomeScorer, conversations: Conversations) -> list[float | None]:
        raw = member.scores(conversations)
        if not self.normalise:
            return raw
        return [None if value is None else (value - member.mean) / member.std for value in raw]

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return self.explained([trajectory.messages for trajectory in trajectories])


class ProcessRewardModel:
    """Scores the steps of finished conversations; a reward function of whole groups.

    `aggregate` makes one number of the log-probabilities of a solution's steps, as
    objectives.reward_model.solution_score does.
    """

    def __init__(
        self,
        members: Sequence[StepScorer],
        *,
        aggregate: Callable[[Sequence[float]], float],
        combine: Combine = "mean",
    ) -> None:
        _check(members, combine)
        self.members, self.aggregate, self.combine = tuple(members), aggregate, combine

    def step_scores(self, conversations: Conversations) -> list[tuple[float, ...] | None]:
        """P(right) of each step of the last answer, combined over the members step by step."""
        columns = [member.step_logprobs(conversations) for member in self.members]
        out: list[tuple[float, ...] | None] = []
        for rows in zip(*columns, strict=True):
            known = [row for row in rows if row is not None]
            if len(known) < len(rows):
                out.append(None)
                continue
            steps = zip(*known, strict=True)
            out.append(tuple(combined([math.exp(z) for z in step], self.combine) for step in steps))
        return out

    def scores(self, conversations: Conversations) -> list[float | None]:
        """One number for each conversation, from its steps."""
        return [
            None if steps is None else self._aggregated(steps) for steps in self.step_scores(conversations)
        ]

    def _aggregated(self, steps: Sequence[float]) -> float:
        # mean-std may fall below 0, and a probability may round to 0: the logarithm has a floor
        return self.aggregate([math.log(max(p, 1e-30)) for p in steps])

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        found = self.step_scores([trajectory.messages for trajectory in trajectories])
        return [
            Score(None)
            if steps is None
            else Score(self._aggregated(steps), {f"step{k}": p for k, p in enumerate(steps)})
            for steps in found
        ]


def _check(members: Sequence[object], combine: str) -> None:
    if not members:
        raise ConfigError("an ensemble needs at least one reward model; give a folder")
    if combine not in get_args(Combine):
        known = get_args(Combine)
        raise ConfigError(
            f"combine must be one of {', '.join(known)}; got {combine!r}.{nearest(combine, known)}"
        )
