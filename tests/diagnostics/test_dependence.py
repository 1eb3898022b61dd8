"""Attributing responses to prompts: certain, by chance, and whatever cannot be measured."""

from __future__ import annotations

import math
import random

import pytest
from episodes import episode, group

from stepladder.diagnostics.dependence import prompt_retrieval, responses, retrieval


def test_responses_that_name_their_prompt_are_found() -> None:
    classes = [[(k, 10, 11), (k, 12), (k, 11, 10)] for k in range(4)]
    assert retrieval(classes) == 1.0


def test_varied_text_that_ignores_the_prompt_is_attributed_by_chance() -> None:
    """High entropy, no dependence: the template collapse. 200 uniform texts over 4 prompts; the standard
    error of the accuracy is √(.25·.75/200) = .031, of the corrected share .041."""
    rng = random.Random(0)
    classes = [[tuple(rng.randrange(20) for _ in range(6)) for _ in range(50)] for _ in range(4)]
    assert retrieval(classes) < 3 * 0.041


def test_one_template_for_all_is_chance_or_less() -> None:
    assert retrieval([[(1, 2, 3)] * 4, [(1, 2, 3)] * 4, [(1, 2, 3)] * 4]) == 0.0


def test_a_partial_dependence_lies_between() -> None:
    """Half of the responses name their prompt, half are one filler: those are never attributed (leaving one
    out makes the own prompt the least likely). Accuracy 1/2 with 4 classes is (1/2 − 1/4)/(3/4)."""
    classes = [[(k,), (k,), (9,), (9,)] for k in range(4)]
    assert retrieval(classes) == pytest.approx(1 / 3)


def test_the_first_turn_that_differs_is_asked() -> None:
    same = group("a", [episode(0.0, prompt=(0,), ids=(5,))] * 2)
    other = group("b", [episode(0.0, prompt=(1,), ids=(6,))] * 2)
    assert responses([same, other]) == {(0,): [(5,), (5,)], (1,): [(6,), (6,)]}
    assert prompt_retrieval([same, other]) == 1.0


def test_one_prompt_or_single_responses_cannot_be_measured() -> None:
    same = group("a", [episode(0.0)] * 4)
    assert math.isnan(prompt_retrieval([same]))
    apart = group("b", [episode(0.0, prompt=(k,)) for k in range(3)])
    assert math.isnan(prompt_retrieval([apart]))
    with pytest.raises(ValueError, match="two prompts"):
        retrieval([[(1,), (2,)]])


def test_solved_groups_are_not_asked() -> None:
    a = group("a", [episode(1.0, prompt=(0,))] * 2)
    b = group("b", [episode(0.0, prompt=(1,))] * 2)
    assert math.isnan(prompt_retrieval([a, b]))
