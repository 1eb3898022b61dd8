"""Two worlds with known labels: what they call better is better, what they call wrong is wrong."""

from __future__ import annotations

import asyncio

import pytest

from stepladder.environments.check import check_environment
from stepladder.environments.environment import load_world
from stepladder.environments.worlds.reviews import BAD, GOOD, ReviewsWorld, worth
from stepladder.environments.worlds.step_sums import StepSumsWorld
from stepladder.errors import ConfigError
from stepladder.types import Message


@pytest.mark.parametrize("name", ["reviews", "step_sums"])
def test_the_contract_holds(name: str) -> None:
    assert not [c for c in check_environment(load_world(name)).checks if c.status == "fail"]


def test_the_word_lists_do_not_overlap_and_the_worth_is_by_hand() -> None:
    assert not set(GOOD) & set(BAD)
    assert worth("The room was lovely, the staff rude.") == 0.5
    assert worth("The room was lovely, the staff friendly.") == 1.0
    assert worth("Broken.") == 0.25


def test_the_chosen_review_is_worth_more_and_every_prompt_is_its_own() -> None:
    pairs = ReviewsWorld().preferences(50, 3)
    assert all(worth(p.chosen[0].text) > worth(p.rejected[0].text) for p in pairs)
    assert len({p.prompt[0].text for p in pairs}) == 50
    assert pairs == ReviewsWorld().preferences(50, 3)
    assert pairs != ReviewsWorld().preferences(50, 4)


def test_a_step_is_labelled_right_until_the_first_false_sum() -> None:
    found = StepSumsWorld().step_solutions(80, 1)
    wrong = 0
    for solution in found:
        numbers = [int(n) for n in solution.prompt[0].text.split("+")]
        good, total = True, numbers[0]
        for step, number, label in zip(solution.steps, numbers[1:], solution.labels, strict=True):
            left, _, result = step.partition("=")
            assert left == f"{total}+{number}"  # each step works on from the one before
            good = good and total + number == int(result)
            assert label == float(good)
            total = int(result)
        wrong += not good
    assert 20 < wrong < 60


def test_a_rejected_chain_has_a_false_sum_and_a_chosen_one_none() -> None:
    for pair in StepSumsWorld().preferences(30, 0):
        for side, right in ((pair.chosen, True), (pair.rejected, False)):
            sums = [line.split("=") for line in side[0].text.splitlines()]
            assert all(sum(map(int, left.split("+"))) == int(result) for left, result in sums) == right


@pytest.mark.parametrize(("answer", "reward"), [("3+4=7\n7+9=16", 1.0), ("3+4=7\n7+9=17", 0.0), ("16", 1.0)])
def test_the_last_result_counts(answer: str, reward: float) -> None:
    async def play() -> float | None:
        environment = load_world("step_sums").make()
        task = StepSumsWorld().get("train", 0)
        await environment.reset(type(task)("t", messages=(Message("user", "3+4+9"),), reference="16"), seed=0)
        return (await environment.step(Message("assistant", answer))).reward

    assert asyncio.run(play()) == reward


@pytest.mark.parametrize(("option", "value"), [("terms", 1), ("largest", 1)])
def test_sums_without_steps_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} must be at least 2"):
        StepSumsWorld(**{option: value})
