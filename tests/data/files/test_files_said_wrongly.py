"""Files whose words would be lost, or taken for something else, without a word: refused or said aloud."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from data_files import chat, jsonl

from stepladder.data.files.datasets import read_dataset
from stepladder.errors import DataError
from stepladder.types import Message


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"text": "a"}\n' * 400))
    data[12:30] = bytes(255 - byte for byte in data[12:30])
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        read_dataset(tmp_path / "a.jsonl.gz")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,completion\na,good,bad\n")
    with pytest.raises(DataError, match=r"a\.csv, header: names a column twice, .completion"):
        read_dataset(tmp_path / "a.csv")


def test_hidden_folders_hold_no_data(tmp_path: Path) -> None:
    """Editors keep old copies there (.ipynb_checkpoints, .cache)."""
    jsonl(tmp_path / "a.jsonl", [{"text": "new"}])
    (tmp_path / ".ipynb_checkpoints").mkdir()
    jsonl(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", [{"text": "old"}])
    assert [r.text for r in read_dataset(tmp_path, "text").records] == ["new"]


def test_a_data_folder_may_lie_in_a_hidden_one(tmp_path: Path) -> None:
    inside = tmp_path / ".mine" / "data"
    inside.mkdir(parents=True)
    jsonl(inside / "a.jsonl", [{"text": "new"}])
    assert len(read_dataset(inside)) == 1


@pytest.mark.parametrize("parameters", [[1, 2], 3, "[1]"])
def test_parameters_of_a_tool_are_an_object(tmp_path: Path, parameters: Any) -> None:
    row = {"messages": chat("a", "b"), "tools": [{"name": "f", "parameters": parameters}]}
    with pytest.raises(DataError, match=r"line 1, field tools\[0\].parameters: must be an object"):
        read_dataset(jsonl(tmp_path / "a.jsonl", [row]))


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "a", "completions": ["b", "c"], "scores": [10**400, 1]}
    with pytest.raises(DataError, match=r"field scores\[0\]: must be finite"):
        read_dataset(jsonl(tmp_path / "a.jsonl", [row]))


def test_the_system_message_of_a_prompt_is_kept(tmp_path: Path) -> None:
    """The sides repeat the question, and the prompt alone has the system message."""
    system = {"role": "system", "content": "Be kind."}
    sides = {"chosen": chat("Hi", "Ho"), "rejected": chat("Hi", "Hm")}
    rows = [{"prompt": [system, *chat("Hi")], **sides}, {"prompt": [system], **sides}]
    records = read_dataset(jsonl(tmp_path / "a.jsonl", rows), "preference").records
    assert [r.prompt for r in records] == [(Message("system", "Be kind."), Message("user", "Hi"))] * 2
    other = [{"role": "system", "content": "Be mean."}]
    rows = [{"prompt": [system, *chat("Hi")], **{k: other + v for k, v in sides.items()}}]
    with pytest.raises(DataError, match="line 1, field prompt: must be what chosen and rejected begin with"):
        read_dataset(jsonl(tmp_path / "a.jsonl", rows))


def test_a_judged_conversation_agrees_with_its_prompt(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "completion": chat("Hi", "Ho", "And?", "So."), "label": True}
    with pytest.raises(DataError, match="line 1, field prompt: must be what the completion begins with"):
        read_dataset(jsonl(tmp_path / "a.jsonl", [row]))
    (record,) = read_dataset(jsonl(tmp_path / "a.jsonl", [row | {"prompt": "And?"}]), "unpaired").records
    assert [m.text for m in record.prompt] == ["Hi", "Ho", "And?"]
    assert [m.text for m in record.completion] == ["So."]


def test_a_system_column_beside_a_system_message_is_said(tmp_path: Path) -> None:
    row = {"system": "Be mean.", "messages": chat("Hi", "Ho", system="Be kind.")}
    data = read_dataset(jsonl(tmp_path / "a.jsonl", [row]))
    assert data.records[0].messages[0].text == "Be kind."
    assert "system column left out for the message's own in 1" in data.description


def test_a_printed_python_list_is_no_answer(tmp_path: Path) -> None:
    """What pandas writes into a CSV file for a column of lists."""
    row = {"prompt": "Hi", "chosen": str(chat("Hi", "Ho")), "rejected": str(chat("Hi", "Hm"))}
    with pytest.raises(DataError, match=r"line 1, field chosen: .*as Python prints it"):
        read_dataset(jsonl(tmp_path / "a.jsonl", [row]))


def test_messages_in_a_string_are_found_whatever_key_comes_first(tmp_path: Path) -> None:
    sides = {side: json.dumps([{"id": 1, **m} for m in chat("Hi", side)]) for side in ("chosen", "rejected")}
    (record,) = read_dataset(jsonl(tmp_path / "a.jsonl", [sides]), "preference").records
    assert [record.prompt[0].text, record.chosen[0].text] == ["Hi", "chosen"]
    answer = '[{"id": 1, "role": "king"}]'  # JSON that is an answer stays one
    sides = {"prompt": "Hi", "chosen": answer, "rejected": "no"}
    (record,) = read_dataset(jsonl(tmp_path / "b.jsonl", [sides]), "preference").records
    assert record.chosen[0].text == answer


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_turn_marked_as_not_to_be_learned_is_refused(tmp_path: Path, mark: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = list(chat("a", "wrong", "no", "right"))
    messages[1] |= mark
    with pytest.raises(DataError, match=r"line 1, field messages\[1\]\.(weight|train): "):
        read_dataset(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]))
    messages[1] |= dict.fromkeys(mark, 1)
    assert len(read_dataset(jsonl(tmp_path / "a.jsonl", [{"messages": messages}]))) == 1


def test_what_follows_the_last_answer_is_said(tmp_path: Path) -> None:
    rows = [{"messages": chat("a", "b", "Thanks.")}, {"messages": chat("a", "c")}]
    said = "messages after the last answer left out in 1"
    assert said in read_dataset(jsonl(tmp_path / "a.jsonl", rows)).description
    pair = {"chosen": chat("a", "b", "Thanks."), "rejected": chat("a", "c")}
    assert said in read_dataset(jsonl(tmp_path / "b.jsonl", [pair])).description


def test_completions_alone_can_be_told_to_be_a_ranking(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completions": ["b", "c"]}])
    assert read_dataset(file, ambiguous_as="ranking").kind == "ranking"
    with pytest.raises(DataError, match="fit two meanings"):
        read_dataset(file)


def test_the_nulls_of_a_parquet_struct_are_no_arguments(tmp_path: Path) -> None:
    """A column has one type, so that every call has every call's arguments, as null."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for arguments in ({"a": 1}, {"b": 2}):
        call = {"function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [*chat("Hi"), called, {"role": "tool", "content": "1"}, *chat("", "x")[1:]]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    records = read_dataset(tmp_path / "a.parquet", "demonstration").records
    assert [r.messages[1].tool_calls[0].arguments for r in records] == [{"a": 1}, {"b": 2}]
