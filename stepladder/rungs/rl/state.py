"""Where the loop of reinforcement learning stands, and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepladder.objectives.kl import adaptive_entropy_coefficient, adaptive_kl_coefficient
from stepladder.recipe.rl import RlSection
from stepladder.recipe.rl_credit import CriticSection
from stepladder.rungs.rl.shaping import Shaping, annealed
from stepladder.rungs.rl.turn_credit import CreditRules, OwnAdvantage


@dataclass(slots=True)
class RlState:
    """Where the loop stands besides weights, moments and the sampler."""

    step: int = 0
    seconds: float = 0.0
    history: list[float] = field(default_factory=list)  # success of the last steps
    kl_coefficient: float | None = None  # of the reward, once it has adapted
    entropy: float | None = None  # of the last step, nats a token
    entropy_coefficient: float = 0.0  # of the adaptive bonus
    tool_rate: float = 0.0  # of the last step
    reference_step: int = 0  # after which the reference was taken
    tasks_trained: int = 0  # whose episodes were in the batch of an update
    tasks_discarded: int = 0  # that were played and in no batch
    dry: int = 0  # steps in a row without a live group, under dynamic sampling

    def plain(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history[-20:],
            "kl_coefficient": self.kl_coefficient,
            "entropy": self.entropy,
            "entropy_coefficient": self.entropy_coefficient,
            "tool_rate": self.tool_rate,
            "reference_step": self.reference_step,
            "tasks_trained": self.tasks_trained,
            "tasks_discarded": self.tasks_discarded,
            "dry": self.dry,
        }


def credit_rules(settings: RlSection, state: RlState, own: OwnAdvantage | None = None) -> CreditRules:
    """How this step's rewards become advantages."""
    critic = settings.critic or CriticSection()
    discount = settings.credit.turn_gamma
    if discount is None:
        discount = 0.95 if settings.credit.kind == "gigpo" else 1.0
    return CreditRules(
        credit=settings.credit.kind,
        normalise=settings.credit.normalise,
        baseline=settings.credit.baseline or 0.0,
        gamma=settings.credit.gamma,
        turn_gamma=discount,
        lam=critic.lam,
        turn_lam=critic.turn_lam,
        anchor_weight=settings.credit.anchor_weight,
        kl_coefficient=reward_kl_coefficient(settings, state),
        bootstrap=critic.bootstrap,
        own=own,
    )


def reward_kl_coefficient(settings: RlSection, state: RlState) -> float:
    """β of the KL term in the reward: 0 without one, the row's until it has adapted."""
    row = settings.row()
    if row.kl_in != "reward":
        return 0.0
    return row.kl_coefficient if state.kl_coefficient is None else state.kl_coefficient


def adapt_kl(settings: RlSection, state: RlState, kl: float, episodes: int) -> None:
    """Move β towards rl.kl.target, by the KL of an episode just measured."""
    if settings.kl.target is not None and episodes:
        state.kl_coefficient = adaptive_kl_coefficient(
            reward_kl_coefficient(settings, state),
            kl=kl,
            target=settings.kl.target,
            samples=episodes,
            horizon=settings.kl.horizon,
        )


def entropy_bonus(settings: RlSection, state: RlState) -> float:
    """The coefficient to apply now: fixed, or moved by the entropy that the last step measured."""
    if settings.entropy.target is None:
        return settings.entropy.coefficient
    if state.entropy is None:
        return 0.0
    state.entropy_coefficient, now = adaptive_entropy_coefficient(
        state.entropy_coefficient,
        entropy=state.entropy,
        target=settings.entropy.target,
        delta=settings.entropy.step,
    )
    return now


def shaping_rules(settings: RlSection, state: RlState, max_tokens: int) -> Shaping:
    """Bonuses and the length penalty as they stand at this step."""
    return Shaping(
        bonuses=[(bonus, annealed(bonus, state.step, state.tool_rate)) for bonus in settings.bonuses],
        overlong=settings.row().overlong_penalty,
        limit=max_tokens,
        buffer=settings.overlong.share * max_tokens,
    )


def horizon(settings: RlSection, state: RlState, max_turns: int) -> int:
    """Turns that an episode of this step may have."""
    if settings.horizon.start is None:
        return max_turns
    return min(max_turns, settings.horizon.start + state.step // settings.horizon.every)
