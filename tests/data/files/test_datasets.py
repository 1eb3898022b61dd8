"""Recognition by columns: what each format's rows mean, what is said aloud, and what is refused where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import chat, jsonl

from stepladder.data.files.datasets import convert, read_dataset
from stepladder.data.files.records import Demonstration, Preference, Ranking, Steps, Text, Unpaired
from stepladder.errors import DataError
from stepladder.types import Message, ToolCall

Q, A, B = Message("user", "2+2?"), Message("assistant", "4"), Message("assistant", "5")
PAIR = Preference((Q,), (A,), (B,))
DONE = Demonstration((Q, A), answers_from=1)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": chat("2+2?", "4")}, Demonstration((Q, A))),
        ({"messages": json.dumps(chat("2+2?", "4"))}, Demonstration((Q, A))),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            Demonstration((Q, A)),
        ),
        (
            {"system": "Be brief.", "messages": chat("2+2?", "4")},
            Demonstration((Message("system", "Be brief."), Q, A)),
        ),
        ({"prompt": "2+2?", "completion": "4"}, DONE),
        ({"prompt": chat("2+2?"), "completion": [{"role": "assistant", "content": "4"}]}, DONE),
        ({"question": "2+2?", "answer": "4"}, DONE),
        ({"instruction": "2+2?", "input": "", "output": "4"}, DONE),
        (
            {"instruction": "Add.", "input": "2 2", "output": "4"},
            Demonstration((Message("user", "Add.\n\n2 2"), A), answers_from=1),
        ),
        ({"text": "Once."}, Text("Once.")),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
        ({"chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5")}, PAIR),
        ({"prompt": "2+2?", "chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5")}, PAIR),
        ({"prompt": "2+2?", "chosen": chat("2+2?", "4")[1:], "rejected": chat("2+2?", "5")[1:]}, PAIR),
        ({"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"}, PAIR),
        ({"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": "4", "rejected": "5"}, PAIR),
        (
            {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 8.5, "score_rejected": 6},
            Preference((Q,), (A,), (B,), margin=2.5),
        ),
        ({"prompt": "2+2?", "completion": "4", "label": True}, Unpaired((Q,), (A,), True)),
        ({"prompt": "2+2?", "completion": "5", "label": 0}, Unpaired((Q,), (B,), False)),
        ({"prompt": "2+2?", "completion": "4", "label": "true"}, Unpaired((Q,), (A,), True)),
        ({"completion": chat("2+2?", "4"), "label": 1.0}, Unpaired((Q,), (A,), True)),
        (
            {"prompt": "2+2?", "completions": ["5", "4"], "scores": [0, 1]},
            Ranking((Q,), ((A,), (B,)), scores=(1.0, 0.0)),
        ),
        ({"prompt": "2+2?", "completions": ["5", "4"], "ranks": [2, 1]}, Ranking((Q,), ((A,), (B,)))),
        ({"prompt": "2+2?", "responses": ["4", "5"]}, Ranking((Q,), ((A,), (B,)))),
        (
            {"prompt": "2+2?", "answers": [{"answer": "5", "rank": 2}, {"answer": "4", "rank": 1}]},
            Ranking((Q,), ((A,), (B,))),
        ),
        (
            {"prompt": "2+2?", "responses": ["4", "5", "5"], "ranks": [1, 2, 2]},
            Ranking((Q,), ((A,), (B,), (B,)), ranks=(1, 2, 2)),
        ),
        (
            {"prompt": "2+2?", "completions": ["two", "four"], "labels": [True, False]},
            Steps((Q,), ("two", "four"), (1.0, 0.0)),
        ),
        ({"prompt": "2+2?", "steps": ["two", "four"]}, Steps((Q,), ("two", "four"))),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_a_row_means(tmp_path: Path, row: dict[str, Any], wanted: object) -> None:
    assert read_dataset(jsonl(tmp_path / "d.jsonl", [row, row])).records == [wanted, wanted]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": chat("Hi")}, r"line 2, field messages: holds no message of the assistant"),
        ({"messages": chat("Hi", "Ho")[1:]}, r"field messages\[0\]: is the assistant's, but nobody asked"),
        ({"messages": chat("Hi", "Ho", "?") + chat("", "b")[1:] * 2}, r"messages\[4\].*follows another"),
        ({"messages": None, "text": 3}, r"line 2, field messages: must not be null.*most rows are"),
        ({"other": 1}, r"line 2, field messages: is missing; got.*most rows are conversations, such as"),
        ({"prompt": "a", "completion": "b"}, r"this row alone would be a conversation"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"messages": chat("Hi", "Ho")}
    with pytest.raises(DataError, match=reason):
        read_dataset(jsonl(tmp_path / "d.jsonl", [good, row, good]))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "", "completion": "b"}, r"field prompt: must not be empty"),
        ({"prompt": chat("a", "b"), "completion": "c"}, r"field prompt: must end with a message of the user"),
        ({"prompt": "a", "completion": chat("c")}, r"field completion: must begin with a message of the a"),
        ({"prompt": "a", "completion": 3}, r"field completion: must be a non-empty list of messages; got"),
        ({"text": " "}, r"field text: must not be empty"),
        ({"text": 3}, r"field text: must be a string"),
        ({"chosen": "yes", "rejected": "no"}, r"field prompt: is missing, and chosen and rejected begin"),
        ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, r"field rejected: must begin with the same"),
        (
            {"prompt": "x", "chosen": chat("a", "b"), "rejected": chat("a", "d")},
            r"field prompt: must be what chosen and rejected begin with; got \'x\'",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, r"field margin: must be a number"),
        ({"prompt": "a", "completion": "b", "label": 3}, r"field label: must be true or false, 1 or 0"),
        ({"completion": "b", "label": True}, r"field prompt: is missing"),
        ({"prompt": "a", "completions": ["b", "c"], "scores": [1]}, r"field scores: must hold one number"),
        (
            {"prompt": "a", "completions": ["b", "c"], "scores": [1, None]},
            r"field scores\[1\]: must be a number; got \'None\'",
        ),
        ({"prompt": "a", "responses": ["b"]}, r"field responses: must hold at least two"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [1]}, r"field labels: must hold one label for"),
        (
            {"prompt": "a", "completions": ["b", "c"], "labels": [1, -1]},
            r"field labels\[1\]: must be true or false, or a probability between 0 and 1; got \'-1\'",
        ),
        ({"prompt": "a", "steps": ["b", ""]}, r"field steps\[1\]: must not be empty"),
        ({"speech": "a"}, r'line 1: the columns speech fit no format; give one of \{"prompt"'),
        ({}, r"line 1: the columns of an empty object fit no format"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_dataset(jsonl(tmp_path / "d.jsonl", [row]))


def test_it_says_what_it_read(tmp_path: Path) -> None:
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "id": 7}
    implicit = {"chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "4")}
    path = jsonl(tmp_path / "pairs.jsonl", [pair] * 3 + [implicit])
    assert read_dataset(path).description == (
        "pairs.jsonl: 4 preferences (columns prompt, chosen, rejected; ignored id; "
        "chosen equals rejected in 1; implicit prompt in 1)"
    )
    both = {"messages": chat("2+2?", "4"), "chosen": "4", "rejected": "5", "prompt": "2+2?", "text": "t"}
    assert read_dataset(jsonl(path, [both])).description == (
        "pairs.jsonl: 1 preference (columns chosen, rejected, prompt; ignored messages, text; "
        "read as chosen and rejected, not as conversation or text)"
    )


def test_an_implicit_prompt_is_the_words_that_both_sides_begin_with(tmp_path: Path) -> None:
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is bleak."},
        {"chosen": "Why? No", "rejected": "Why? No, never"},
    ]
    first, second = read_dataset(jsonl(tmp_path / "d.jsonl", rows)).records
    assert first == Preference(
        (Message("user", "The sky is"),), (Message("assistant", "blue."),), (Message("assistant", "bleak."),)
    )
    assert second.prompt == (Message("user", "Why?"),)
    assert (second.chosen[0].content, second.rejected[0].content) == ("No", "No, never")


def test_completions_alone_have_two_meanings_and_one_must_be_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "2+2?", "completions": ["4", "5"]}])
    with pytest.raises(DataError, match=r'fit two meanings, rankings .* and solutions in steps.*kind="rank'):
        read_dataset(path)
    assert read_dataset(path, "ranking").records == [Ranking((Q,), ((A,), (B,)))]
    assert read_dataset(path, "steps").records == [Steps((Q,), ("4", "5"))]
    assert read_dataset(path, "preference").records == [PAIR]


def test_conversions_lose_nothing_or_say_what(tmp_path: Path) -> None:
    pairs = jsonl(tmp_path / "p.jsonl", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    unpaired = read_dataset(pairs, "unpaired")
    assert unpaired.records == [Unpaired((Q,), (A,), True), Unpaired((Q,), (B,), False)]
    assert unpaired.description.endswith("-> 2 completions with a label (a row for each side)")
    assert read_dataset(pairs, "demonstration").records == [DONE]
    assert convert(unpaired, "demonstration").records == [DONE]
    assert "1 labelled false left out" in convert(unpaired, "demonstration").description
    row = {"prompt": "2+2?", "responses": ["5", "4", "6"], "scores": [0, 1, 0]}
    ranked = read_dataset(jsonl(tmp_path / "r.jsonl", [row]), "preference")
    six = Message("assistant", "6")
    assert ranked.records == [
        Preference((Q,), (A,), (B,), margin=1.0),
        Preference((Q,), (A,), (six,), margin=1.0),
    ]
    assert "1 of equally good ones left out" in ranked.description


def test_fault_trains_on_thumbs_down_completion_and_label_is_no_demonstration(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "completion": t, "label": t == "4"} for t in ("4", "5")]
    assert read_dataset(jsonl(tmp_path / "d.jsonl", rows), "demonstration").records == [DONE]
    with pytest.raises(DataError, match="gives no conversations"):
        read_dataset(jsonl(tmp_path / "d.jsonl", rows[1:]), "demonstration")


def test_a_file_of_another_kind_is_refused_by_what_it_is(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"messages": chat("Hi", "Ho")}])
    with pytest.raises(DataError, match=r"d.jsonl: 1 conversation .*cannot be used as preferences. Give row"):
        read_dataset(path, "preference")
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    with pytest.raises(DataError, match="they can be made into completions with a label or conversations"):
        read_dataset(path, "ranking")


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "completion": "4"}
    one = read_dataset(jsonl(tmp_path / "a.jsonl", [row])).fingerprint
    alpaca = {"id": 1, "instruction": "2+2?", "input": "", "output": "4"}
    assert read_dataset(jsonl(tmp_path / "b.jsonl", [alpaca])).fingerprint == one
    assert read_dataset(jsonl(tmp_path / "c.jsonl", [row, row])).fingerprint != one
    assert read_dataset(jsonl(tmp_path / "d.jsonl", [row | {"completion": "4 "}])).fingerprint != one


def test_tool_calls_in_every_spelling(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    openai = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": call}]}
    older = {"role": "assistant", "content": "", "function_call": call}
    text = {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    result, last = {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}
    tools = json.dumps([{"type": "function", "function": {"name": "add", "parameters": "{}"}}])
    rows = [{"messages": [*chat("1?"), m, result, last], "tools": tools} for m in (openai, older, text)]
    records = read_dataset(jsonl(tmp_path / "d.jsonl", rows)).records
    assert [r.messages[1].tool_calls[0].arguments for r in records] == [{"a": 1}] * 3
    assert {r.tools[0].name for r in records} == {"add"}
    sharegpt = [
        {"from": "human", "value": "1?"},
        {"from": "gpt", "value": "Let me see."},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "One."},
    ]
    (record,) = read_dataset(jsonl(tmp_path / "s.jsonl", [{"conversations": sharegpt}])).records
    assert record.messages[1] == Message("assistant", "Let me see.", (ToolCall("add", {"a": 1}),))
    assert [m.role for m in record.messages] == ["user", "assistant", "tool", "assistant"]
