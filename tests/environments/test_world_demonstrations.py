"""demonstrations(count, seed): anyone's class may have it, and what it returns is coerced and checked."""

import re

import pytest

from stepladder.environments.environment import as_world
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message, Reset, Step, ToolCall

TALK = (Message("user", "Price of tea?"), Message("assistant", "4"))


class Plain:
    """A newcomer's class; the demonstrations know the constructor's options."""

    def __init__(self, price=4):
        self.price = price

    def reward(self, answer):
        return 1.0

    def demonstrations(self, count, seed):
        talk = [{"role": "user", "content": f"{seed}?"}, {"role": "assistant", "content": str(self.price)}]
        return [talk] * count

    @staticmethod
    def tasks(split):
        return ["Price of tea?"]


class Episode:
    """An Environment class alone."""

    tasks = staticmethod(lambda split: ["?"])

    def reset(self, task, *, seed):
        return Reset(task.messages)

    def step(self, message):
        return Step(reward=1.0, terminated=True)

    @classmethod
    def demonstrations(cls, count, seed):
        return [list(TALK) for _ in range(count)]


def returning(value):
    class Odd(Episode):
        demonstrations = staticmethod(lambda count, seed: value)

    return as_world(Odd)


def test_a_plain_class_demonstrates_with_its_options():
    world = as_world(Plain, price=7)
    assert world.demonstrates
    assert world.demonstrations(2, 5) == [(Message("user", "5?"), Message("assistant", "7"))] * 2


def test_an_environment_class_demonstrates():
    world = as_world(Episode)
    assert world.demonstrates
    assert world.demonstrations(3, 0) == [TALK] * 3
    assert world.demonstrations(0, 0) == []


def test_a_class_without_demonstrations_says_so():
    world = as_world(type("Bare", (), {"reward": lambda self, answer: 1.0}), tasks=["?"])
    assert not world.demonstrates
    with pytest.raises(ConfigError, match=r"Bare has no demonstrations\(count, seed\) method; add one"):
        world.demonstrations(1, 0)


def test_calls_are_coerced_as_in_any_message():
    call = {"id": "1", "type": "function", "function": {"name": "price", "arguments": '{"item": "tea"}'}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    ((_, calling, _, _),) = returning([talk]).demonstrations(1, 0)
    assert calling.tool_calls == (ToolCall("price", {"item": "tea"}, id="1"),)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (None, TypeError, "returned None; return a list of conversations"),
        ("hello", TypeError, "returned 'hello'; return a list of conversations"),
        (list(TALK), TypeError, "conversation 0 is one message; give a list of them"),
        ([[]], TypeError, "conversation 0 is empty"),
        ([TALK[:1]], TypeError, "conversation 0 ends with a message from 'user'"),
        ([[{"role": "bot"}]], TypeError, "role 'bot'"),
        ([TALK] * 3, DataError, "returned 3 conversations, 1 was asked for"),
        ([], DataError, "returned 0 conversations, 1 was asked for"),
    ],
)
def test_what_is_no_list_of_conversations_is_refused(value, kind, words):
    with pytest.raises(kind, match=re.escape(words)) as caught:
        returning(value).demonstrations(1, 0)
    assert "demonstrations() of Odd" in str(caught.value)


def test_an_async_demonstrations_is_refused():
    class Slow(Episode):
        @staticmethod
        async def demonstrations(count, seed):
            return [TALK] * count

    with pytest.raises(TypeError, match="make it a plain function"):
        as_world(Slow).demonstrations(1, 0)
