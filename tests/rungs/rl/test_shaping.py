"""Bonuses and the length penalty: who is paid, how much, at which turn, and until when."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_episodes import episode, group

from stepladder.errors import ConfigError
from stepladder.recipe.config import load_recipe
from stepladder.recipe.rl_credit import BonusSection
from stepladder.rungs.rl.shaping import Shaping, annealed, overlong, shaped
from stepladder.types import Failure, Message, ToolCall, Trajectory


def paid(trajectory: Trajectory, bonus: BonusSection, weight: float | None = None) -> Trajectory:
    rules = Shaping(bonuses=[(bonus, bonus.weight if weight is None else weight)])
    return shaped([group(trajectory)], rules)[0].trajectories[0]


def test_a_bonus_for_each_call_stands_at_its_turn_and_ends_at_the_cap() -> None:
    """Calls 1, 2, 0, 1 at .10: .1, .2, 0, .1 without a cap; with a cap of .25 the third call earns half."""
    one = episode([0.0, 0.0, 0.0, 1.0], calls=[1, 2, 0, 1])
    free = paid(one, BonusSection(kind="tool", per="call"))
    assert free.rewards == pytest.approx((0.1, 0.2, 0.0, 1.1))
    assert free.score.value == pytest.approx(1.4)
    assert free.score.parts == {"tool_bonus": pytest.approx(0.4)}
    capped = paid(one, BonusSection(kind="tool", per="call", cap=0.25))
    assert capped.rewards == pytest.approx((0.1, 0.15, 0.0, 1.0))
    assert capped.score.value == pytest.approx(1.25)


def test_calls_in_plain_text_are_counted_by_their_pattern() -> None:
    one = episode([0.0, 0.0, 1.0], answers=["<search>a</search><search>b</search>", "<search>", "3"])
    bonus = BonusSection(kind="tool", per="call", pattern="<search>.*?</search>")
    assert paid(one, bonus).rewards == pytest.approx((0.2, 0.0, 1.0))


def test_a_cost_for_each_call_is_a_negative_bonus() -> None:
    one = paid(episode([0.0, 1.0], calls=[3, 0]), BonusSection(kind="tool", per="call", weight=-0.1, cap=0.2))
    assert one.rewards == pytest.approx((-0.2, 1.0))


def test_once_an_episode() -> None:
    bonus = BonusSection(kind="tool", weight=0.15)
    assert paid(episode([0.0, 1.0], calls=[0, 2]), bonus).rewards == pytest.approx((0.0, 1.15))
    assert paid(episode([0.0, 1.0]), bonus).score.value == 1.0


def test_only_when_solved() -> None:
    """DeepEyes pays the tool only in right answers; the toy pays it always."""
    bonus = BonusSection(kind="tool", weight=1.2, only_solved=True)
    right = episode([0.8], calls=[1], parts={"correct": 1.0})
    wrong = episode([0.0], calls=[1], parts={"correct": 0.0})
    assert paid(right, bonus).score.value == pytest.approx(2.0)
    assert paid(wrong, bonus).score.value == 0.0


def test_format() -> None:
    bonus = BonusSection(kind="format", weight=0.5, pattern="^<think>")
    assert paid(episode([0.0, 0.0], answers=["x", "<think>y"]), bonus).rewards == (0.0, 0.5)
    assert paid(episode([0.0], answers=["y"]), bonus).score.value == 0.0
    assert paid(episode([0.0], answers=["<think>y"], stop="length"), bonus).score.value == 0.0


def test_format_without_a_pattern_asks_for_an_end_in_time_and_calls_that_can_be_read() -> None:
    bonus = BonusSection(kind="format", weight=0.5)
    assert paid(episode([0.0], answers=["anything"]), bonus).score.value == 0.5
    assert paid(episode([0.0], answers=["anything"], stop="max_turns"), bonus).score.value == 0.0
    call = Message("assistant", "", tool_calls=(ToolCall("f", error="no JSON"),))
    one = episode([0.0, 0.0])
    torn = dataclasses.replace(one, messages=(one.messages[0], call, *one.messages[2:]))
    assert paid(torn, bonus).score.value == 0.0


def test_what_failed_or_was_not_scored_is_left_as_it_is() -> None:
    bonus = BonusSection(kind="tool")
    unscored = episode([None], calls=[1])
    assert paid(unscored, bonus) == unscored
    broken = Trajectory(
        "i", "g", unscored.task, (), (), (), unscored.score, "failed", failure=Failure("tool", "E", "m")
    )
    assert paid(broken, bonus) == broken


@settings(deadline=None, max_examples=50)
@given(weight=st.floats(0.01, 2), steps=st.integers(1, 50), step=st.integers(0, 80), rate=st.floats(0, 1))
def test_annealing_starts_whole_falls_and_ends_at_nothing(
    weight: float, steps: int, step: int, rate: float
) -> None:
    by_steps = BonusSection(kind="tool", weight=weight, anneal_steps=steps)
    assert annealed(by_steps, 0, rate) == weight
    assert annealed(by_steps, steps, rate) == 0.0
    assert annealed(by_steps, step + 1, rate) <= annealed(by_steps, step, rate)
    by_rate = BonusSection(kind="tool", weight=weight, until_tool_rate=0.8)
    assert annealed(by_rate, step, 0.0) == weight
    assert annealed(by_rate, step, max(rate, 0.8)) == 0.0
    assert 0.0 <= annealed(by_rate, step, rate) <= weight


@pytest.mark.parametrize(
    ("tokens", "limit", "buffer", "penalty"),
    [(16384, 20480, 4096, 0.0), (18432, 20480, 4096, -0.5), (20480, 20480, 4096, -1.0), (90, 100, 20, -0.5)],
)
def test_the_soft_punishment_of_dapo(tokens: int, limit: int, buffer: float, penalty: float) -> None:
    assert overlong(tokens, limit, buffer) == penalty


def test_the_longest_turn_is_punished_where_it_stands() -> None:
    """Limit 10, buffer 4: 8 tokens are half way into it."""
    one = shaped([group(episode([0.0, 1.0], tokens=[8, 2]))], Shaping(overlong=1.0, limit=10, buffer=4))
    trajectory = one[0].trajectories[0]
    assert trajectory.rewards == pytest.approx((-0.5, 1.0))
    assert trajectory.score.parts == {"overlong": -0.5}
    assert trajectory.score.value == pytest.approx(0.5)


def test_a_misspelt_key_of_a_bonus_is_answered() -> None:
    data = {
        "environment": {"name": "calculator"},
        "rl": {"bonuses": [{"kind": "tool", "wieght": 0.1}]},
    }
    with pytest.raises(ConfigError, match=r"rl\.bonuses\.0\.wieght.*Did you mean 'weight'"):
        load_recipe(data)
    data["rl"] = {"bonuses": [{"kind": "tool", "per": "call", "cap": 0.05}]}
    with pytest.raises(ConfigError, match=r"cap=0\.05 is less than one bonus of weight=0\.1"):
        load_recipe(data)
