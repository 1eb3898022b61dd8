"""Several worlds in one: shares, order, who plays what, and that nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.environments.check import check_environment
from stepladder.environments.checked import CheckedWorld
from stepladder.environments.environment import load_world
from stepladder.environments.mixed import interleaved
from stepladder.errors import ConfigError
from stepladder.types import Message


class Fixed:
    """A small class of a user: answers are worth `worth`."""

    inline = True

    def __init__(self, worth: float = 1.0, count: int = 10) -> None:
        self.worth = worth

    def reward(self, answer: str) -> float:
        return self.worth


def entry(label: str, count: int, weight: float = 1, **options: Any) -> dict[str, Any]:
    rows = {s: [{"prompt": f"{label}{i}", "domain": "x"} for i in range(count)] for s in ("train", "test")}
    return {"name": Fixed, "label": label, "weight": weight, "options": {"tasks": rows, **options}}


def mixture(*worlds: dict[str, Any]) -> CheckedWorld:
    return load_world("mixed", worlds=list(worlds))


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_every_start_of_the_order_has_the_shares(weights: list[int]) -> None:
    """Nowhere is a world more than one task ahead of its share or behind it."""
    shares = [w / sum(weights) for w in weights]
    order = interleaved(shares, 100)
    for n in range(1, 101):
        for k, share in enumerate(shares):
            assert abs(order[:n].count(k) - n * share) < len(weights)
    assert sum(abs(order.count(k) - 100 * s) for k, s in enumerate(shares)) < len(weights)


def test_training_shows_every_task_and_keeps_the_weights() -> None:
    """Three to one, 30 and 40 tasks: 40 of the second take 160 in all, and the first comes four times."""
    world = mixture(entry("a", 30, 3), entry("b", 40, 1))
    tasks = [world.get("train", i) for i in range(world.count("train"))]
    assert len(tasks) == 160
    counts = Counter(task.id for task in tasks)
    assert len(counts) == 70
    assert Counter(task.domain for task in tasks) == {"a/x": 120, "b/x": 40}


def test_other_splits_repeat_nothing() -> None:
    world = mixture(entry("a", 30, 3), entry("b", 40, 1))
    n = world.count("test")
    ids = [world.get("test", i).id for i in range(n)]
    assert len(set(ids)) == n
    order = interleaved([0.75, 0.25], 100)  # ends where "a" would need a 31st task
    assert n == [i for i, k in enumerate(order) if k == 0][30]
    assert mixture(entry("a", 100), entry("b", 130)).count("test") == 200


def test_an_episode_is_played_in_the_world_of_its_task() -> None:
    world = mixture(entry("a", 4, worth=10.0), entry("b", 4, worth=0.1))

    async def play(i: int) -> tuple[str, str, float | None]:
        task = world.get("train", i)
        environment = world.make()
        reset = await environment.reset(task, seed=task.seed)
        step = await environment.step(Message("assistant", "x"))
        await environment.close()
        return task.domain, reset.messages[-1].text, step.reward

    got = [asyncio.run(play(i)) for i in range(2)]
    assert got == [("a/x", "a0", 10.0), ("b/x", "b0", 0.1)]


def test_the_contract_holds() -> None:
    worlds = [{"name": "hidden_digit"}, {"name": "calculator", "weight": 2}]
    report = check_environment("mixed", worlds=worlds)
    assert report.ok, str(report)


def test_demonstrations_of_worlds_with_the_same_tools() -> None:
    digits = {"name": "hidden_digit"}
    world = mixture({**digits, "label": "one"}, {**digits, "label": "two", "options": {"digits": 3}})
    assert len(world.demonstrations(7, 0)) == 7
    with pytest.raises(ConfigError, match="different tools"):
        mixture(digits, {"name": "calculator"}).demonstrations(2, 0)


@pytest.mark.parametrize(
    ("worlds", "words"),
    [
        ([], "needs worlds"),
        (["calculator"], "is a table such as"),
        ([{"name": "calculater"}], "Did you mean 'calculator'"),
        ([{"name": "calculator", "wieght": 2}], "Did you mean 'weight'"),
        ([{"name": "calculator", "weight": 0}], "number above 0"),
        ([{"name": "calculator"}, {"name": "calculator"}], "another label"),
        ([{"name": "calculator"}, {"name": "hidden_digit", "weight": 0.001}], "too small"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(worlds: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_world("mixed", worlds=worlds)
