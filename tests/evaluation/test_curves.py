"""Curves over samples: every number by hand or by enumeration, failures in the denominator."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.errors import ConfigError
from stepladder.evaluation.answers import canonical
from stepladder.evaluation.curves import (
    Curve,
    Kind,
    Point,
    best_of_k,
    bootstrap_interval,
    crossover,
    curve,
    task_value,
)
from stepladder.evaluation.result import Sample, TaskSamples
from stepladder.objectives.estimators import majority_success
from stepladder.reports.tables import wilson_interval


def task(*samples: Sample, name: str = "0") -> TaskSamples:
    return TaskSamples(name, "d", samples)


RIGHT, WRONG = Sample(True, "4", 0.9), Sample(False, "5", 0.8)


def test_pass_at_k_is_per_task_and_unbiased() -> None:
    """n = 8, c = 3, k = 4: 1 - C(5,4)/C(8,4) = 1 - 5/70 = .928571 (fault 115); beside an unsolved task
    the mean is half of it."""
    solved = task(*[RIGHT] * 3, *[WRONG] * 5)
    assert task_value(solved, "pass", 4) == pytest.approx(1 - 5 / 70)
    unsolved = task(*[WRONG] * 8, name="1")
    assert curve([solved, unsolved], "pass", [4]).at(4).value == pytest.approx((1 - 5 / 70) / 2)


def test_more_samples_than_were_drawn_are_refused() -> None:
    with pytest.raises(ConfigError, match="--samples 9"):
        task_value(task(*[RIGHT] * 8), "pass", 9)


def test_a_failed_episode_is_unsolved_and_votes_for_nobody() -> None:
    """Ten episodes, seven right, three crashed: pass@1 is .7 (fault 116), the majority of what was said 4."""
    broken = Sample(False, None, None, failed=True)
    ten = task(*[RIGHT] * 7, *[broken] * 3)
    assert task_value(ten, "pass", 1) == pytest.approx(0.7)
    assert task_value(ten, "maj", 1) == pytest.approx(0.7)
    assert task_value(ten, "maj", 10) == 1.0
    assert task_value(task(broken, broken), "maj", 2) == 0.0
    assert task_value(task(broken, broken), "weighted", 2) == 0.0


def test_weighted_votes_and_the_best_differ_as_by_hand() -> None:
    """A .9 + .2 against B .8 + .7: the best is A, the heavier B; B is right."""
    samples = (
        Sample(False, "A", 0.9),
        Sample(True, "B", 0.8),
        Sample(False, "A", 0.2),
        Sample(True, "B", 0.7),
    )
    assert task_value(task(*samples), "best", 4) == 0.0
    assert task_value(task(*samples), "weighted", 4) == 1.0
    assert task_value(task(*samples), "maj", 4) == 0.0  # two each: the first seen, A


def test_votes_of_k_follow_the_binomial() -> None:
    """p = .6 over many independent samples: maj@3 .648, maj@9 .733432 (spec D7), here from 60 of 100 drawn
    without replacement, by 200 draws: standard error sqrt(.648 * .352/200) = .034 a task, .0024 over 200."""
    tasks = [task(*[RIGHT] * 60, *[WRONG] * 40, name=str(i)) for i in range(200)]
    exact = {
        k: sum(math.comb(60, j) * math.comb(40, k - j) for j in range(k // 2 + 1, k + 1)) / math.comb(100, k)
        for k in (3, 9)
    }
    for k in (3, 9):
        assert curve(tasks, "maj", [k]).at(k).value == pytest.approx(exact[k], abs=0.01)
        assert exact[k] == pytest.approx(majority_success(0.6, k), abs=0.02)


scored = st.builds(
    Sample, st.booleans(), st.sampled_from(["a", "b", None]), st.sampled_from([None, 0.1, 0.5, 0.9])
)


@given(st.lists(scored, min_size=1, max_size=6), st.data())
def test_best_of_k_is_the_mean_over_all_subsets(samples: list[Sample], data: st.DataObject) -> None:
    """Every subset of k, every one of the equals at its top: enumerated."""
    k = data.draw(st.integers(1, len(samples)))
    total, subsets = 0.0, list(itertools.combinations(samples, k))
    for subset in subsets:
        top = max(-math.inf if s.score is None else s.score for s in subset)
        ties = [s.solved for s in subset if (-math.inf if s.score is None else s.score) == top]
        total += sum(ties) / len(ties)
    assert best_of_k(samples, k) == pytest.approx(total / len(subsets))


@given(st.lists(scored, min_size=1, max_size=6), st.data())
def test_no_way_of_choosing_beats_a_perfect_verifier(samples: list[Sample], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    one = task(*(s if s.answer or not s.solved else Sample(True, "a", s.score) for s in samples))
    kinds: tuple[Kind, ...] = ("best", "pass")
    best, ideal = (task_value(one, kind, k) for kind in kinds)
    assert best <= ideal + 1e-12
    if k > 1:
        assert task_value(one, "pass", k) >= task_value(one, "pass", k - 1)


def test_the_bootstrap_covers_as_often_as_it_says() -> None:
    """A normal mean: values 0, .5, 1 with equal chance have variance 1/6; over 150 tasks the 95 % interval
    has width 2 * 1.96 * sqrt(1/6/150) = .1307, and it is found within a tenth."""
    low, high = bootstrap_interval([0.0, 0.5, 1.0] * 50)
    assert high - low == pytest.approx(0.1307, rel=0.1)
    assert low < 0.5 < high


def test_where_all_tasks_agree_the_interval_is_that_of_the_count() -> None:
    assert bootstrap_interval([0.0] * 10) == wilson_interval(0, 10)
    assert bootstrap_interval([1.0] * 10) == wilson_interval(10, 10)
    assert bootstrap_interval([0.5] * 10) == wilson_interval(5, 10)


def test_tasks_played_once_are_a_count() -> None:
    """Three of four solved: Wilson's interval, whichever way the one sample is used."""
    tasks = [task(RIGHT)] * 3 + [task(WRONG)]
    kinds: tuple[Kind, ...] = ("pass", "maj", "best", "weighted")
    for kind in kinds:
        assert curve(tasks, kind, [1]).at(1) == Point(1, 0.75, *wilson_interval(3, 4))


def line(*values: float) -> Curve:
    return Curve("pass", tuple(Point(2**i, v, v, v) for i, v in enumerate(values)))


def test_the_crossover_is_where_the_one_behind_has_caught_up() -> None:
    """Trained ahead at 1, base ahead from 4 on: RL sharpened."""
    assert crossover(line(0.6, 0.7, 0.75, 0.8), line(0.2, 0.5, 0.75, 0.9)) == 4
    assert crossover(line(0.6, 0.7), line(0.2, 0.5)) is None
    assert crossover(line(0.2, 0.9), line(0.5, 0.6)) == 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 3 = 5. Answer: 5", "5"),
        ("Answer: 1\nNo. **Answer: 12.50**", "12.5"),
        ("so \\boxed{1,024}", "1024"),
        ("answer: -0.0", "0"),
        ("+7", "7"),
        ("The  Eiffel\ntower.", "the eiffel tower"),
        ("1,2", "1,2"),  # no number with a comma for thousands
        ("  ", None),
        ("Answer:", None),
        # A choice's letter, alone, in brackets, with a bracket or a stop, in bold.
        ("B", "b"),
        ("(B)", "b"),
        ("b).", "b"),
        ("Answer: **(B)**.", "b"),
        ("\\boxed{(B)}", "b"),
        ("(a) or (b)", "(a) or (b)"),
        # Money, and numbers in mathematics.
        ("$12", "12"),
        ("-$1,200.50.", "-1200.5"),
        ("\\boxed{\\$5}", "5"),
        ("\\(12\\)", "12"),
        ("(1,200)", "(1,200)"),  # a pair, not 1200
        ("f(x)", "f(x)"),
        ("'Yes'", "yes"),
        ("it's 12 %", "it's 12 %"),
    ],
)
def test_equal_answers_are_equal_texts(text: str, answer: str | None) -> None:
    assert canonical(text) == answer
