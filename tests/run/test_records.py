"""Trajectories survive JSON; what is no number becomes null; prompts are stored as what they add."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.run.records import (
    encode_line,
    message_from_dict,
    message_to_dict,
    to_json,
    trajectory_from_dict,
    trajectory_to_dict,
)
from stepladder.types import (
    Failure,
    ImagePart,
    Message,
    Sampling,
    Score,
    Task,
    TextPart,
    ToolCall,
    TrainingSample,
    Trajectory,
    Turn,
)

TEXT = st.text(max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False, width=32)
MAYBE = st.none() | NUMBER
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
IDS = st.lists(st.integers(0, 9), max_size=5).map(tuple)
CALLS = st.builds(ToolCall, TEXT, OBJECT, TEXT, st.none() | TEXT, TEXT)
PARTS = st.lists(st.builds(TextPart, TEXT) | st.builds(ImagePart, TEXT), min_size=1, max_size=2).map(tuple)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT | PARTS,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
    reasoning=st.none() | TEXT,
    raw=st.none() | TEXT,
)
TASKS = st.builds(
    Task,
    TEXT,
    messages=st.lists(MESSAGES, max_size=1).map(tuple),
    reference=JSON,
    seed=st.integers(),
    data=OBJECT,
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Mostly each prompt starts with all earlier tokens; sometimes history was edited."""
    out, before = [], ()
    for _ in range(draw(st.integers(0, 3))):
        prompt = (before if draw(st.booleans()) else before[:2]) + draw(IDS)
        tokens = draw(IDS)
        logprobs = tuple(draw(NUMBER) for _ in tokens)
        sampling = Sampling(draw(NUMBER), 5, draw(IDS), draw(st.integers()))
        versions = ((draw(st.integers(0, 3)), len(tokens)),)
        out.append(
            Turn(prompt, tokens, logprobs, sampling, versions, draw(st.sampled_from(["stop", "length"])))
        )
        before = prompt + tokens
    return tuple(out)


@st.composite
def samples(draw: st.DrawFn) -> TrainingSample:
    rest = draw(st.lists(st.tuples(st.integers(0, 9), st.booleans(), NUMBER, st.integers(-1, 3)), max_size=4))
    ids, mask, logprobs, owner = zip((1, False, 0.0, -1), *rest)
    images = tuple(draw(st.lists(st.builds(ImagePart, TEXT), max_size=1)))
    return TrainingSample(ids, mask, logprobs, draw(TEXT), owner, draw(TEXT), images)


TRAJECTORIES = st.builds(
    Trajectory,
    id=TEXT,
    group_id=TEXT,
    task=TASKS,
    turns=turns(),
    messages=st.lists(MESSAGES, max_size=2).map(tuple),
    rewards=st.lists(MAYBE, max_size=3).map(tuple),
    score=st.builds(Score, MAYBE, st.dictionaries(TEXT, MAYBE, max_size=2), TEXT),
    stop_reason=st.sampled_from(["terminated", "truncated", "max_turns", "length", "context", "failed"]),
    failure=st.none() | st.builds(Failure, st.sampled_from(["engine", "tool"]), TEXT, TEXT),
    seconds=NUMBER,
    samples=st.lists(samples(), max_size=2).map(tuple),
    info=OBJECT,
)


@settings(max_examples=150, deadline=None)
@given(TRAJECTORIES)
def test_a_trajectory_comes_back_through_one_line(trajectory: Trajectory) -> None:
    line = encode_line(trajectory_to_dict(trajectory, samples=True))
    assert line.count(b"\n") == 1
    assert trajectory_from_dict(json.loads(line)) == trajectory


@given(MESSAGES)
def test_a_message_comes_back(message: Message) -> None:
    assert message_from_dict(json.loads(json.dumps(message_to_dict(message)))) == message


def _turn(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Turn:
    return Turn(prompt, tokens, (-0.5,) * len(tokens), Sampling(), ((0, len(tokens)),), "stop")


def _trajectory(**changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "id": "t",
        "group_id": "g",
        "task": Task("x"),
        "turns": (_turn((1, 2), (3, 4)), _turn((1, 2, 3, 4, 5), (6,))),
        "messages": (),
        "rewards": (0.0, 1.0),
        "score": Score(1.0),
        "stop_reason": "terminated",
    }
    return Trajectory(**{**values, **changes})


def test_a_prompt_is_stored_as_what_it_adds() -> None:
    first, second = trajectory_to_dict(_trajectory())["turns"]
    assert (first["keep"], first["prompt_ids"]) == (0, [1, 2])
    assert (second["keep"], second["prompt_ids"]) == (4, [5])
    assert "token_texts" not in first
    assert "samples" not in trajectory_to_dict(_trajectory())


def test_decode_gives_the_text_of_each_token() -> None:
    first, second = trajectory_to_dict(_trajectory(), decode=lambda ids: "-".join(map(str, ids)))["turns"]
    assert (first["prompt_text"], first["token_texts"]) == ("1-2", ["3", "4"])
    assert (second["prompt_text"], second["token_texts"]) == ("5", ["6"])


def test_numbers_that_are_none_become_null() -> None:
    turn = Turn((1,), (2,), (-math.inf,), Sampling(), ((0, 1),), "stop")
    trajectory = _trajectory(rewards=(math.nan,), score=Score(math.nan, {"a": math.inf}), turns=(turn,))
    back = trajectory_from_dict(json.loads(encode_line(trajectory_to_dict(trajectory))))
    assert back.rewards == (None,)
    assert back.score == Score(None, {"a": None})
    assert math.isnan(back.turns[0].logprobs[0])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (torch.tensor(3), 3),
        (np.array([1.0, np.nan]), [1.0, None]),
        ((1, (2,)), [1, [2]]),
        ({1: {2}}, {"1": [2]}),
        (True, True),
        (1j, "1j"),
    ],
)
def test_to_json(value: Any, expected: Any) -> None:
    result = to_json(value)
    assert result == expected
    assert type(result) is type(expected)


def test_hostile_text_stays_on_its_line() -> None:
    text = "a\u2028b\nc\x00d\ud800"  # a line separator, a newline, a NUL, half a surrogate pair
    line = encode_line({"x": text})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"x": text}
