"""What foreign code gives, turned into our nouns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.boundary import shown, to_message, to_messages, to_number, to_score, to_task, to_tasks
from stepladder.errors import DataError, RewardError
from stepladder.types import ImagePart, Message, Score, Task, TextPart, ToolCall

TEXT = st.text(max_size=10)
NAMES = st.text(min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(
    NAMES, st.none() | st.integers() | TEXT | st.lists(st.booleans(), max_size=2), max_size=3
)
CALLS = st.builds(ToolCall, NAMES, ARGUMENTS, id=TEXT)
PARTS = st.lists(st.builds(TextPart, TEXT) | st.builds(ImagePart, NAMES), max_size=3).map(tuple)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT | PARTS,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
    reasoning=st.none() | TEXT,
)


@settings(deadline=None)
@given(MESSAGES)
def test_a_message_survives_its_own_dictionary(message):
    assert to_message(message.to_dict(), where="test") == message
    assert to_messages([message.to_dict(), message], where="test") == (message, message)


def test_openai_dictionaries_of_other_software():
    read = to_message(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        where="test",
    )
    assert read == Message("assistant", "", (ToolCall("f", {"x": 1}, id="a"),))
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "a.png"},
        {"type": "image", "url": "b"},
    ]
    read = to_message({"role": "user", "content": parts}, where="test")
    assert read.content == (TextPart("see"), ImagePart("a.png"), ImagePart("b"))
    assert to_messages("hi", where="test", role="tool") == (Message("tool", "hi"),)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "here gave 5; give a str"),
        ({}, "role None"),
        ([["nested"]], "as a message"),
        (b"bytes", "here gave b'bytes'"),
        ({"role": "user", "content": [{"type": "audio"}]}, "as a part of a message"),
        ({"role": "user", "content": b"x"}, "as message content"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "as a tool call"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "no JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "give a dict"),
    ],
)
def test_what_is_no_message_is_refused(value, text):
    with pytest.raises(TypeError) as caught:
        to_messages(value, where="here")
    assert text in str(caught.value)


class Scalar:
    """A number as array libraries have them."""

    ndim = 0

    def item(self):
        return 2.5


class Vector(Scalar):
    ndim = 1


@settings(deadline=None)
@given(st.floats(-1e15, 1e15) | st.integers(-(10**9), 10**9) | st.booleans())
def test_numbers_become_floats(value):
    number = to_number(value, where="f")
    assert type(number) is float
    assert number == value


def test_other_scalars_and_none():
    assert to_number(Scalar(), where="f") == 2.5
    assert to_number(None, where="f") is None
    assert to_score(None, where="f") == Score(None)
    assert to_score(Score(1, {"a": True, "b": None}, "why"), where="f") == Score(
        1.0, {"a": 1.0, "b": None}, "why"
    )
    for value in (Vector(), "1", [1], float("nan"), float("inf"), Score("1")):
        with pytest.raises(RewardError, match=r"^f returned"):
            to_score(value, where="f")


def test_tasks_from_rows():
    row = {
        "prompt": "2?",
        "reference": 2,
        "level": 3,
        "data": {"kept": 1},
        "seed": 9,
        "id": 4,
        "domain": "sums",
    }
    expected = Task("4", "test", "sums", (Message("user", "2?"),), 2, seed=9, data={"kept": 1, "level": 3})
    assert to_task(row, split="test", index=0, where="f") == expected
    assert to_task("2?", split="dev", index=7, where="f") == Task(
        "dev/7", "dev", messages=(Message("user", "2?"),), seed=7
    )
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    assert [m.role for m in to_task(chat, split="train", index=0, where="f").messages] == ["system", "user"]
    assert to_task({"board": "x"}, split="train", index=0, where="f").messages == ()
    assert to_tasks((text for text in "ab"), split="train", where="f")[1].id == "train/1"
    # a Task keeps everything but the split it was asked for under
    assert to_task(Task("x"), split="test", index=0, where="f") == Task("x", "test")
    for value in (3, None, ["a"]):
        with pytest.raises(DataError, match="task 5 of split 'train' from f"):
            to_task(value, split="train", index=5, where="f")
    with pytest.raises(DataError, match="give a list of tasks"):
        to_tasks({"prompt": "x"}, split="train", where="f")


def test_what_is_shown_is_short():
    assert len(shown("x" * 1000)) < 100
    assert shown([1]) == "[1]"


@pytest.mark.parametrize("value", [1e300, -1e16, 10**400])
def test_a_reward_whose_square_is_no_float32_is_refused(value: float) -> None:
    with pytest.raises(RewardError, match=r"reward f returned .*(at most|finite number)"):
        to_number(value, where="reward f")
    assert to_number(1e15, where="reward f") == 1e15
