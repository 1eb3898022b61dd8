"""Numbers and their texts."""

import math
import sys
from pathlib import Path

import pytest

from stepladder.reports.run import RunData
from stepladder.reports.tables import (
    duration,
    example_pair,
    families,
    interval_text,
    number,
    percent,
    rung_rows,
    steps_up,
    wilson_interval,
)

sys.path.insert(0, str(Path(__file__).parent))


def _run(*evaluations: dict) -> RunData:
    return RunData(Path("run"), (), evaluations, "", {})


def test_wilson_by_hand() -> None:
    """k = 5, n = 10, z² = 3.8415: centre .5; half = z·sqrt(.025 + z²/400) / (1 + z²/10)
    = 1.95996·sqrt(.0346037)/1.38415 = .364595/1.38415 = .263407."""
    assert wilson_interval(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    # k = 0: the low end is 0 and the high end z²/(n + z²) = 3.8415/13.8415
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_wilson_refuses_nonsense(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(k, n)


def test_wilson_covers_95_percent() -> None:
    """Exact binomial coverage at n = 100, averaged over p: what the interval is for."""
    n, grid = 100, [i / 100 for i in range(2, 99)]
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    total = 0.0
    for p in grid:
        total += sum(
            math.comb(n, k) * p**k * (1 - p) ** (n - k)
            for k, (low, high) in enumerate(intervals)
            if low <= p <= high
        )
    assert total / len(grid) == pytest.approx(0.95, abs=0.01)


def test_the_last_evaluation_of_each_rung_counts_in_climbing_order() -> None:
    rows = rung_rows(
        _run(
            {"rung": "raw", "n": 10, "success": 0.0},
            {"rung": "rl", "n": 10, "success": 0.5, "interval": [0.2, 0.8]},
            {"rung": "rl", "n": 20, "success": 0.7},
        )
    )
    assert [(row.rung, row.success, row.n) for row in rows] == [("raw", 0.0, 10), ("rl", 0.7, 20)]
    assert rows[0].interval == wilson_interval(0, 10)  # made where the record has none
    assert rows[1].interval == wilson_interval(14, 20)


def test_an_evaluation_without_numbers_is_shown_as_such() -> None:
    (row,) = rung_rows(_run({"rung": "mine", "n": 0, "success": None}))
    assert (row.label, percent(row.success), interval_text(row.interval)) == ("mine", "-", "-")


def test_families_in_order() -> None:
    a, b = {"n": 1, "success": 0.0}, {"n": 1, "success": 1.0}
    rows = rung_rows(
        _run({"rung": "raw", "by_domain": {"x": a}}, {"rung": "rl", "by_domain": {"x": b, "y": b}})
    )
    assert families(rows) == ["x", "y"]


def test_before_and_after_are_the_same_task_and_not_chosen_by_score() -> None:
    def example(task: str, score: float) -> dict:
        return {"task": {"id": task}, "score": {"value": score}}

    rows = rung_rows(
        _run(
            {"rung": "raw", "examples": [example("a", 0), example("b", 1), example("c", 0)]},
            {"rung": "rl", "examples": [example("c", 1), example("b", 0)]},
            {"rung": "more-sft", "examples": [example("a", 1)]},
        )
    )
    pair = example_pair(rows)
    assert pair is not None
    (before, first), (after, second) = pair
    assert (before.rung, after.rung) == ("raw", "rl")
    assert first == example("b", 1)
    assert second == example("b", 0)
    assert example_pair(rows[:1]) is None


def test_texts() -> None:
    assert percent(0.805) == "80.5 %"
    assert interval_text((0.0, 0.038)) == "0.0 to 3.8 %"
    assert [duration(s) for s in (None, 59.94, 60, 3599.6, 3600)] == [
        "-",
        "59.9 s",
        "1 min 00 s",
        "1 h 0 min",
        "1 h 0 min",
    ]
    assert [number(x) for x in (None, float("nan"), 0, -2.5, 1e9)] == ["-", "-", "0", "-2.5", "1.00e+09"]


def test_each_rung_against_the_one_before_on_the_same_tasks() -> None:
    """Raw played fewer tasks, so SFT has nothing before it; RL solves five more and loses one:
    p = 2 * (C(6,0) + C(6,1))/64 = 14/64. An evaluation in the middle of RL is no rung."""
    run = _run(
        {"rung": "raw", "n": 4, "success": 0.25, "outcomes": "1000"},
        {"rung": "sft", "n": 8, "success": 0.25, "outcomes": "11000000"},
        {"rung": "rl-20", "n": 8, "success": 1.0, "outcomes": "11111111"},
        {"rung": "rl", "n": 8, "success": 0.75, "outcomes": "01111110"},
    )
    (up,) = steps_up(rung_rows(run))
    assert (up.rung, up.before, up.n, up.better, up.worse) == ("rl", "sft", 8, 5, 1)
    assert up.p == pytest.approx(14 / 64)
    assert steps_up(rung_rows(_run({"rung": "sft", "n": 8, "success": 0.5}))) == []  # an older run
