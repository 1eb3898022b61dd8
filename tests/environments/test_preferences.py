"""preferences(count, seed): a better and a worse answer to a prompt, from the calculator or any class."""

from __future__ import annotations

from typing import Any

import pytest

from stepladder.data.files.records import Preference
from stepladder.environments.environment import as_world, load_world
from stepladder.environments.worlds.arithmetic import evaluate, last_number, shown
from stepladder.environments.worlds.calculator import CalculatorWorld, is_correct, split_of
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message, Task

PAIRS = CalculatorWorld().preferences(300, 1)


def test_the_better_side_is_right_and_the_worse_one_wrong() -> None:
    for pair in PAIRS:
        right, wrong = pair.chosen[-1].text, pair.rejected[-1].text
        reference = right.removeprefix("Answer: ")
        assert is_correct(right, reference)
        assert not is_correct(wrong, reference)
        assert pair.chosen != pair.rejected


def test_the_calculator_never_lies_not_even_in_a_mistake() -> None:
    for pair in PAIRS:
        for side in (pair.chosen, pair.rejected):
            if side[0].tool_calls:
                expression = side[0].tool_calls[0].arguments["expression"]
                assert side[1].text == shown(evaluate(expression))


def test_all_kinds_of_mistakes_are_made() -> None:
    kinds = {"guess": 0, "misread": 0, "wrong expression": 0}
    for pair in PAIRS:
        if not pair.rejected[0].tool_calls:
            kinds["guess"] += 1
        elif pair.rejected[0] == pair.chosen[0]:
            kinds["misread"] += 1
        else:
            kinds["wrong expression"] += 1
            assert last_number(pair.rejected[-1].text) == last_number(pair.rejected[1].text)
    assert min(kinds.values()) >= 30


def test_they_are_training_problems_with_the_tools_and_follow_from_the_seed() -> None:
    assert all(split_of(pair.prompt[-1].text) == "train" for pair in PAIRS)
    assert [tool.name for tool in PAIRS[0].tools] == ["calculator"]
    again = CalculatorWorld().preferences(300, 1)
    assert [(p.prompt, p.chosen, p.rejected) for p in again] == [
        (p.prompt, p.chosen, p.rejected) for p in PAIRS
    ]
    assert CalculatorWorld().preferences(3, 2) != PAIRS[:3]


class Own:
    """A newcomer's class; its preferences know the constructor's options."""

    def __init__(self, price: int = 4) -> None:
        self.price = price

    def reward(self, answer: str) -> float:
        return 1.0

    def preferences(self, count: int, seed: int) -> list[Any]:
        prompt = (Message("user", f"Price of tea? {seed}"),)
        sides = [(Message("assistant", str(p)),) for p in (self.price, self.price + 1)]
        return [Preference(prompt, *sides)] * count

    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [Task("0", messages=(Message("user", "Price of tea?"),))]


def test_anyones_class_may_have_them() -> None:
    world = as_world(Own, price=7)
    assert world.prefers
    (pair,) = world.preferences(1, 3)
    assert (pair.prompt[0].text, pair.chosen[0].text) == ("Price of tea? 3", "7")


def test_what_is_no_pair_is_refused() -> None:
    class Wrong(Own):
        def preferences(self, count: int, seed: int) -> list[Any]:
            return [("a", "b", "c")] * count

    class Few(Own):
        def preferences(self, count: int, seed: int) -> list[Any]:
            return super().preferences(count - 1, seed)

    with pytest.raises(DataError, match=r"Wrong gave .*records.Preference"):
        as_world(Wrong).preferences(2, 0)
    with pytest.raises(DataError, match="gave 1 pairs; 2 were asked for"):
        as_world(Few).preferences(2, 0)
    with pytest.raises(ConfigError, match="no preferences"):
        load_world("hidden_digit").preferences(1, 0)
