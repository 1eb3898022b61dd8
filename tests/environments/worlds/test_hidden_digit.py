"""The two-turn world, against the toy loop it comes from."""

import asyncio
import itertools
from collections import Counter

import pytest

from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message, Task, ToolCall

SEARCH = Message("assistant", tool_calls=(ToolCall("search", {}, id="1"),))


def play(world, actions, digit="3"):
    """The steps for a list of actions ("S", digits, or whole messages) on a given digit."""

    async def episode():
        environment = world.make()
        await environment.reset(Task("t", messages=(Message("user", "?"),), reference=digit), seed=0)
        out = []
        for action in actions:
            message = action if isinstance(action, Message) else Message("assistant", action)
            if action == "S" and not world.plain:
                message = SEARCH
            out.append(await environment.step(message))
            if out[-1].terminated:
                break
        return out

    return asyncio.run(episode())


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("actions", "reward", "strict_reward"),
    [
        (["3"], 1.0, 1.0),
        (["2"], 0.0, 0.0),
        (["S", "3"], 1.15, 1.15),
        (["S", "2"], 0.15, 0.15),
        (["S", "S"], 0.15, 0.0),  # the toy pays the bonus for a second search too (spec 0.1)
        (["S", "x"], 0.15, 0.15),
        ([" 3\n"], 1.0, 1.0),
        ([""], 0.0, 0.0),
        (["33"], 0.0, 0.0),
    ],
)
def test_rewards_are_those_of_the_toy(plain, actions, reward, strict_reward):
    for strict, expected in [(False, reward), (True, strict_reward)]:
        steps = play(HiddenDigitWorld(plain=plain, strict=strict), actions)
        assert len(steps) == len(actions)
        assert [step.terminated for step in steps] == [False] * (len(actions) - 1) + [True]
        assert steps[-1].reward == pytest.approx(expected)
        assert sum(steps[-1].rewards.values()) == pytest.approx(expected)


def test_searching_reveals_the_digit():
    (step,) = play(HiddenDigitWorld(), ["S"], digit="4")
    assert step.messages == (Message("user", "4"),)
    (step,) = play(HiddenDigitWorld(plain=False), ["S"], digit="4")
    assert step.messages == (Message("tool", "4", tool_call_id="1", name="search"),)


def test_two_searches_in_one_message_are_two_searches():
    both = Message("assistant", tool_calls=(ToolCall("search", id="1"), ToolCall("search", id="2")))
    (step,) = play(HiddenDigitWorld(plain=False), [both])
    assert step.terminated
    assert step.reward == pytest.approx(0.15)


def test_a_call_that_cannot_be_run_is_no_search():
    wrong = Message("assistant", tool_calls=(ToolCall("serch"), ToolCall("", error="broken")))
    steps = play(HiddenDigitWorld(plain=False), [wrong, "3"])
    assert not steps[0].terminated
    assert steps[-1].reward == 1.0


def test_digits_are_uniform_and_fixed_by_seed_split_and_index():
    world = HiddenDigitWorld()
    digits = [world.get("train", i).reference for i in range(2000)]
    assert digits == [HiddenDigitWorld().get("train", i).reference for i in range(2000)]
    assert digits[:50] != [world.get("test", i).reference for i in range(50)]
    assert digits[:50] != [HiddenDigitWorld(seed=1).get("train", i).reference for i in range(50)]
    # 2000 draws, p = 1/5: mean 400, standard deviation 18; five of them
    assert all(abs(count - 400) < 90 for count in Counter(digits).values())
    assert set(digits) == set("01234")


def test_demonstrations_are_uniformly_random_and_right_by_chance_only():
    world = HiddenDigitWorld()
    conversations = world.demonstrations(6000, seed=1)
    assert conversations == world.demonstrations(6000, seed=1)
    first = Counter(c[1].text for c in conversations)
    # p = 1/6 of 6000: mean 1000, standard deviation 29; five of them
    assert set(first) == set("S01234")
    assert all(abs(count - 1000) < 145 for count in first.values())
    seen = [(c[2].text, c[3].text) for c in conversations if len(c) == 4]
    pairs = Counter(seen)
    assert set(pairs) == set(itertools.product("01234", "S01234"))
    right = sum(a == b for a, b in seen) / len(seen)
    # right is 1/6: standard deviation sqrt(5/36/1000) = .012
    assert abs(right - 1 / 6) < 0.06
    tools = HiddenDigitWorld(plain=False).demonstrations(20, seed=1)
    assert any(message.tool_calls for conversation in tools for message in conversation)
    assert all(message.text != "S" for conversation in tools for message in conversation)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="between 2 and 10"):
        HiddenDigitWorld(digits=11)
    with pytest.raises(DataError, match="0 to 9"):
        HiddenDigitWorld(test=10).get("test", 10)
