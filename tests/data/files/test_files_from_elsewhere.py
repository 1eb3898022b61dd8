"""Files in the shapes that people have, each read into samples or refused with the row and the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, bpe_tokenizer
from data_files import chat, jsonl

from stepladder.data.budget import Budget, Dropped, Tally
from stepladder.data.chat.renderer import Renderer
from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.records import Demonstration, Preference, Unpaired
from stepladder.data.samples import completion_samples, preference_samples, unpaired_samples
from stepladder.errors import DataError
from stepladder.types import TrainingSample

MARKS = ("<|im_start|>", "<|im_end|>")
RENDERER = Renderer(bpe_tokenizer(CHATML, MARKS, ("<tool_call>", "</tool_call>"), eos="<|im_end|>"))


def samples_of(record: Any, budget: Budget, tally: Tally) -> Sequence[TrainingSample]:
    if isinstance(record, Demonstration):
        prompt, rest = record.messages[: record.answers_from], record.messages[record.answers_from :]
        if not prompt:
            return RENDERER.demonstration(record.messages, record.tools, trajectory_id="t")
        made = completion_samples(
            RENDERER, prompt, rest, record.tools, trajectory_id="t", group_id="g", budget=budget, tally=tally
        )
    elif isinstance(record, Preference):
        pair = preference_samples(RENDERER, record, group_id="g", budget=budget, tally=tally)
        return () if isinstance(pair, Dropped) else pair
    else:
        assert isinstance(record, Unpaired)
        made = unpaired_samples(RENDERER, record, group_id="g", budget=budget, tally=tally)
    return () if isinstance(made, Dropped) else (made,)


def trained(path: Path, budget: Budget = Budget()) -> tuple[list[str], str, str]:
    """(what is trained of each sample, the description, the tally) of a file."""
    data, tally = read_dataset(path), Tally()
    samples = [s for record in data.records for s in samples_of(record, budget, tally)]
    shown = [
        RENDERER.decode([t for t, m in zip(s.token_ids, s.mask, strict=True) if m]).replace("<|im_end|>", "|")
        for s in samples
    ]
    return shown, data.description, tally.text


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in pairs]


def test_sharegpt_with_system_turns(tmp_path: Path) -> None:
    rows = [
        {"id": "x_0", "conversations": turns(("system", "Be kind."), ("human", "Hi"), ("gpt", "Ho"))},
        {"id": "x_1", "conversations": turns(("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4"))},
    ]
    shown, text, _ = trained(jsonl(tmp_path / "sharegpt.jsonl", rows))
    assert shown == ["Ho|", "2|4|"]
    assert text == "sharegpt.jsonl: 2 conversations (column conversations; ignored id)"
    rows.append({"id": "x_2", "conversations": turns(("gpt", "And then?"), ("human", "Yes"), ("gpt", "No"))})
    with pytest.raises(DataError, match=r"line 3, field conversations\[0\]: is the assistant's, but nobody"):
        read_dataset(jsonl(tmp_path / "sharegpt.jsonl", rows))
    rows[2]["conversations"] = turns(("human", "Yes"), ("bot", "No"))
    with pytest.raises(
        DataError, match=r"line 3, field conversations\[1\].from: must be one of .*; got 'bot'"
    ):
        read_dataset(jsonl(tmp_path / "sharegpt.jsonl", rows))


def test_anthropic_dialogue_strings(tmp_path: Path) -> None:
    head = "\n\nHuman: What is 2 + 2?\n\nAssistant: Four: 2 + 2\n\nis 4.\n\nHuman: Sure?\n\nAssistant:"
    rows = [
        {"chosen": f"{head} Yes.", "rejected": f"{head} No. Human: error."},
        {"chosen": f"{head} Yes.", "rejected": f"{head}"},  # an empty answer, as some of them have
    ]
    shown, text, _ = trained(jsonl(tmp_path / "hh.jsonl", rows))
    assert shown == ["Yes.|", "No. Human: error.|", "Yes.|", "|"]
    assert (
        text
        == "hh.jsonl: 2 preferences (columns chosen, rejected; an empty answer in 1; implicit prompt in 2)"
    )
    record = read_dataset(tmp_path / "hh.jsonl").records[0]
    assert [m.text for m in record.prompt] == ["What is 2 + 2?", "Four: 2 + 2\n\nis 4.", "Sure?"]
    rows.append({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"})
    with pytest.raises(DataError, match="line 3, field rejected: must begin with the same prompt as chosen"):
        read_dataset(jsonl(tmp_path / "hh.jsonl", rows))


def test_ultrafeedback_columns(tmp_path: Path) -> None:
    row = {
        "prompt": "Why?",
        "prompt_id": "3f",
        "chosen": chat("Why?", "Because."),
        "rejected": chat("Why?", "No."),
        "messages": chat("Why?", "Because."),
        "score_chosen": 8.5,
        "score_rejected": 9.0,
    }
    shown, text, _ = trained(jsonl(tmp_path / "uf.jsonl", [row, row | {"score_rejected": 1}]))
    assert shown == ["Because.|", "No.|"] * 2
    assert text == (
        "uf.jsonl: 2 preferences (columns prompt, chosen, rejected, score_chosen, score_rejected; ignored "
        "prompt_id, messages; chosen is scored below rejected in 1; read as chosen and rejected, not as "
        "conversation)"
    )
    assert [r.margin for r in read_dataset(tmp_path / "uf.jsonl").records] == [-0.5, 7.5]


@pytest.mark.parametrize("labels", [(1, 0), (True, False), ("true", "false"), (1.0, 0.0), ("1", "0")])
def test_kto_labels(tmp_path: Path, labels: tuple[Any, Any]) -> None:
    rows = [{"prompt": "a", "completion": text, "label": x} for text, x in zip("bc", labels, strict=True)]
    shown, text, _ = trained(jsonl(tmp_path / "kto.jsonl", rows))
    assert shown == ["b|", "c|"]
    assert [r.label for r in read_dataset(tmp_path / "kto.jsonl").records] == [True, False]
    assert text.startswith(
        "kto.jsonl: 2 completions with a label (columns prompt, completion, label; read as"
    )
    rows[1]["label"] = 2
    with pytest.raises(DataError, match=r"line 2, field label: must be true or false, .*; got '2'"):
        read_dataset(jsonl(tmp_path / "kto.jsonl", rows))


def test_tool_calls_as_json_strings(tmp_path: Path) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    row: dict[str, Any] = {
        "messages": [
            *chat("1 + 2?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c0"},
            {"role": "assistant", "content": "3."},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}]),
    }
    shown, _, _ = trained(jsonl(tmp_path / "tools.jsonl", [row]))
    assert shown == ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>|3.|']
    call["function"]["arguments"] = '{"a": 1'  # type: ignore[index]
    with pytest.raises(
        DataError, match=r"line 1, field messages\[1\].tool_calls\[0\].arguments: not valid JSON"
    ):
        read_dataset(jsonl(tmp_path / "tools.jsonl", [row]))
    row["tools"] = "add"
    with pytest.raises(DataError, match="line 1, field"):
        read_dataset(jsonl(tmp_path / "tools.jsonl", [row]))


def test_a_byte_order_mark_crlf_and_an_emoji(tmp_path: Path) -> None:
    row = json.dumps({"messages": chat("Hi 👋🏽", "Ho 🙂\u2028!")}, ensure_ascii=False)
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n{row}\r\n".encode())
    assert trained(tmp_path / "windows.jsonl")[0] == ["Ho 🙂\u2028!|"] * 2
    (tmp_path / "windows.csv").write_bytes(
        b'\xef\xbb\xbfprompt,completion\r\nHi,"Ho\r\n\xf0\x9f\x99\x82"\r\n'
    )
    assert trained(tmp_path / "windows.csv")[0] == ["Ho\r\n🙂|"]


def test_half_an_emoji_is_replaced_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"prompt": "a", "completion": "b\\ud83d"}\n')
    assert trained(tmp_path / "cut.jsonl")[0] == ["b?|"]
    assert len(read_dataset(tmp_path / "cut.jsonl").fingerprint) == 64


def test_an_empty_assistant_turn_teaches_to_end_and_is_said_aloud(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "empty.jsonl", [{"messages": chat("Hi", "")}])
    shown, text, _ = trained(path)
    assert shown == ["|"]
    assert text == "empty.jsonl: 1 conversation (column messages; an empty answer in 1)"
    rows = [{"messages": [*chat("Hi"), {"role": "assistant", "content": None}]}]
    with pytest.raises(DataError, match=r"line 1, field messages\[1\].content: is missing"):
        read_dataset(jsonl(path, rows))


@pytest.mark.parametrize(
    ("budget", "counted"),
    [
        (Budget(), "2 rows: 2 kept"),
        (
            Budget(max_prompt_tokens=64, max_completion_tokens=100),
            "2 rows: 2 kept, 1 completion cut, without a terminator (29,901 tokens lost)",
        ),
        (
            Budget(max_completion_tokens=100, overlong="drop"),
            "2 rows: 1 kept, 1 dropped (over max_completion_tokens=100: 1)",
        ),
    ],
)
def test_a_row_of_30k_tokens(tmp_path: Path, budget: Budget, counted: str) -> None:
    """10,000 times two characters and a tab is 30,000 tokens: this vocabulary joins none of them."""
    rows = [{"prompt": "a", "completion": "4,\t" * 10_000}, {"prompt": "a", "completion": "b"}]
    shown, _, tally = trained(jsonl(tmp_path / "long.jsonl", rows), budget)
    assert tally == counted
    assert shown[-1] == "b|"
    assert len(shown) == 1 or shown[0].endswith("|") == (budget == Budget())


def test_alpaca(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "2 2", "output": "4", "text": "Below is an instruction ..."},
        {"instruction": "Say hi.", "input": "", "output": "hi", "text": "Below ..."},
    ]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    shown, text, _ = trained(tmp_path / "alpaca.json")
    assert shown == ["4|", "hi|"]
    assert [r.messages[0].text for r in read_dataset(tmp_path / "alpaca.json").records] == [
        "Add.\n\n2 2",
        "Say hi.",
    ]
    assert text == (
        "alpaca.json: 2 conversations (columns instruction, input, output; ignored text; read as prompt and "
        "completion, not as text)"
    )
    rows[1]["output"] = None  # type: ignore[assignment]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"alpaca.json, row 2, field output: must not be null"):
        read_dataset(tmp_path / "alpaca.json")


def test_parquet_with_nulls_where_other_messages_have_keys(tmp_path: Path) -> None:
    """A column of structs gives every message every key; those it does not have are null."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "One."},
    ]
    tools = json.dumps([{"function": {"name": "add"}}])
    table = arrow.Table.from_pylist([{"messages": messages, "tools": tools}] * 2)
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    shown, text, _ = trained(tmp_path / "chat.parquet")
    assert [s.count("|") for s in shown] == [2, 2]
    assert text == "chat.parquet: 2 conversations (columns messages, tools)"
