"""Numbers of the loop that move from step to step."""

from __future__ import annotations

import pytest

from stepladder.recipe.rl import RlSection
from stepladder.rungs.rl.state import (
    RlState,
    adapt_kl,
    credit_rules,
    entropy_bonus,
    horizon,
    reward_kl_coefficient,
    shaping_rules,
)


def test_the_kl_coefficient_adapts_from_the_rows() -> None:
    """Ziegler: .2 with KL 9, target 6, 256 episodes, horizon 10,000: .2·(1 + .2·.0256) = .201024."""
    settings = RlSection(algorithm="ppo", kl={"coefficient": 0.2, "target": 6.0})
    state = RlState()
    assert reward_kl_coefficient(settings, state) == 0.2
    adapt_kl(settings, state, 9.0, 256)
    assert credit_rules(settings, state).kl_coefficient == pytest.approx(0.201024)
    adapt_kl(settings, state, -1.0, 256)  # an estimate below 0 counts as far below the target
    assert state.kl_coefficient == pytest.approx(0.201024 * (1 - 0.2 * 0.0256))


def test_without_a_target_it_stays() -> None:
    settings, state = RlSection(algorithm="ppo"), RlState()
    adapt_kl(settings, state, 9.0, 256)
    assert state.kl_coefficient is None
    assert reward_kl_coefficient(settings, state) == 0.02
    assert reward_kl_coefficient(RlSection(), state) == 0.0  # grpo has its term in the loss


def test_the_entropy_bonus_rises_below_its_target_and_is_off_above() -> None:
    settings, state = RlSection(entropy={"target": 1.0}), RlState()
    assert entropy_bonus(settings, state) == 0.0  # nothing measured yet
    state.entropy = 0.5
    assert entropy_bonus(settings, state) == pytest.approx(0.005)
    assert entropy_bonus(settings, state) == pytest.approx(0.010)
    state.entropy = 1.5
    assert entropy_bonus(settings, state) == 0.0
    assert state.entropy_coefficient == pytest.approx(0.005)
    assert entropy_bonus(RlSection(entropy={"coefficient": 0.02}), state) == 0.02


def test_the_horizon_grows_to_the_limit() -> None:
    settings = RlSection(horizon={"start": 2, "every": 5})
    assert [horizon(settings, RlState(step=s), 4) for s in (0, 4, 5, 10, 50)] == [2, 2, 3, 4, 4]
    assert horizon(RlSection(), RlState(), 4) == 4


def test_discounts_over_turns_have_the_default_of_their_method() -> None:
    assert credit_rules(RlSection(credit={"kind": "gigpo"}), RlState()).turn_gamma == 0.95
    assert credit_rules(RlSection(credit={"kind": "turns"}), RlState()).turn_gamma == 1.0
    assert credit_rules(RlSection(credit={"kind": "gigpo", "turn_gamma": 0.5}), RlState()).turn_gamma == 0.5


def test_dapo_punishes_length_and_others_do_not() -> None:
    """A fifth of 100 tokens: the punishment begins at 80."""
    rules = shaping_rules(RlSection(algorithm="dapo"), RlState(), 100)
    assert (rules.overlong, rules.limit, rules.buffer) == (1.0, 100, 20.0)
    assert shaping_rules(RlSection(), RlState(), 100).overlong == 0.0
    assert (
        shaping_rules(RlSection(algorithm="dapo", overlong={"penalty": 0.0}), RlState(), 100).overlong == 0.0
    )


def test_the_state_survives_a_checkpoint() -> None:
    state = RlState(3, 1.5, [0.5], 0.1, 0.9, 0.01, 0.3, 2, 1)
    assert RlState(**state.plain()) == state
