"""What siblings still differ in, by hand; solved groups and failures take no part."""

from __future__ import annotations

import math

import pytest
from episodes import episode, group
from hypothesis import given
from hypothesis import strategies as st

from stepladder.diagnostics.variety import open_groups, overlap, spread, variety_metrics


def test_solved_groups_failures_and_unscored_episodes_are_left_out() -> None:
    done = group("a", [episode(1.0), episode(1.0)])
    mixed = group("b", [episode(1.0), episode(0.0), episode(None), episode(0.0, failed="tool")])
    alone = group("c", [episode(0.0), episode(0.0, failed="engine")])
    (members,) = open_groups([done, mixed, alone])
    assert [t.score.value for t in members] == [1.0, 0.0]


def test_the_numbers_by_hand() -> None:
    """Group one: scores 1, 0 -> std .5; texts 1-2-3-4 and 1-2-3-5 share one gram of three.
    Group two: scores 0, 0 -> std 0; both say 7, overlap 1. Surprisal: ten tokens at .2 each."""
    one = group("a", [episode(1.0, ids=(1, 2, 3, 4)), episode(0.0, ids=(1, 2, 3, 5))])
    two = group("b", [episode(0.0, ids=(7,)), episode(0.0, ids=(7,))])
    done = group("c", [episode(1.0, ids=(9,) * 50, logprob=-3.0)] * 2)
    metrics = variety_metrics([one, two, done])
    assert metrics["open_groups"] == pytest.approx(2 / 3)
    assert metrics["reward_std"] == pytest.approx(0.25)
    assert metrics["sibling_overlap"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["surprisal"] == pytest.approx(0.2)


def test_where_nothing_is_open_there_is_no_number() -> None:
    metrics = variety_metrics([group("a", [episode(1.0), episode(1.0)])])
    assert metrics.pop("open_groups") == 0.0
    assert all(math.isnan(value) for value in metrics.values())


texts = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=2, max_size=5)


@given(texts)
def test_overlap_is_a_share_and_one_for_copies(said: list[list[int]]) -> None:
    assert 0.0 <= overlap(said) <= 1.0
    assert overlap([said[0]] * 3) == 1.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(-3, 3))
def test_spread_ignores_a_shift(values: list[float], shift: float) -> None:
    assert spread([v + shift for v in values]) == pytest.approx(spread(values), abs=1e-9)
