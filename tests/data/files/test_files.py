"""Rows as they lie on disk: encodings, line ends, CSV, Parquet, Arrow, folders, and files that are broken."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from data_files import chat, jsonl

from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.disk import read_rows
from stepladder.data.files.records import Demonstration, Preference, Ranking, Unpaired
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message

ROW = {"messages": chat("a\u2028b 🙂", "Ho")}
WANTED = Demonstration((Message("user", "a\u2028b 🙂"), Message("assistant", "Ho")))
LINE = json.dumps(ROW, ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + f"{LINE}\n{LINE}\n".encode()),
        ("crlf.jsonl", f"\r\n{LINE}\r\n\r\n{LINE}".encode()),
        ("escaped.jsonl", f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n".encode()),  # the emoji as two surrogates
        ("list.json", f"[{LINE},\n{LINE}]".encode()),
        ("lines.json", f"{LINE}\n{LINE}\n".encode()),
        ("export.json", f'{{"version": 1, "data": [{LINE}, {LINE}]}}'.encode()),
        ("packed.jsonl.gz", gzip.compress(f"{LINE}\n{LINE}\n".encode())),
        ("upper.JSONL", f"{LINE}\n{LINE}".encode()),
    ],
)
def test_text_files_as_they_are(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_dataset(tmp_path / name).records == [WANTED, WANTED]


def test_a_single_object_of_a_json_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(ROW))
    assert read_dataset(tmp_path / "one.json").records == [WANTED]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"", "a.jsonl holds no rows"),
        ("a.jsonl", b"\n \r\n", "holds no rows"),
        ("a.json", b" ", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.csv", b"prompt,completion\n", "holds no rows"),
        ("a.jsonl", b"\xff\xfe{\x00}\x00", "a.jsonl, line 1: not UTF-8.*looks like UTF-16; save it as UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}', "line 2: not UTF-8 text .*0xe9"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"line 2: must be a JSON object such as .*; got '\[1\]'"),
        ("a.jsonl", b'{"text": "a"}\nnull\n', "line 2: must be a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        ("a.json", b'[{"text": "a"}, 3]', "row 2: must be a JSON object"),
        ("a.json", b'{"text": {"a": 1}}', "must be a JSON list of rows"),
        ("a.json", b'[{"text": "a"}', "a.json: not valid JSON"),
        (
            "a.csv",
            b"prompt,completion\na,b\nc\n",
            r"row 2 \(line 3\): must have 2 cells, one for",
        ),
        ("a.csv", b'prompt,completion\n"a"b,c\n', "line 2: not valid CSV"),
        ("a.txt", b"a", "a.txt is of no known type; a file ends in one of .jsonl"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.parquet", b"no parquet", "cannot be read as Parquet"),
        ("a.arrow", b"no arrow at all", "cannot be read as Arrow"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_row(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_rows(tmp_path / name)


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_dataset(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="matches no file"):
        read_dataset(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="holds no data file"):
        read_dataset(tmp_path)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_csv_cells_are_strings_and_may_hold_line_breaks_and_json(tmp_path: Path) -> None:
    rows = [
        {"prompt": 'Say "hi",\nplease', "completion": "hi", "label": 1},
        {"prompt": "b", "completion": "c", "label": False},
    ]
    first, second = read_dataset(write_csv(tmp_path / "kto.csv", rows)).records
    assert first == Unpaired((Message("user", 'Say "hi",\nplease'),), (Message("assistant", "hi"),), True)
    assert second.label is False
    listed = [{"messages": json.dumps(chat("a", "b")), "tools": ""}]
    (record,) = read_dataset(write_csv(tmp_path / "chat.csv", listed)).records
    assert record == Demonstration((Message("user", "a"), Message("assistant", "b")))
    ranked = [{"prompt": "a", "completions": '["b", "c"]', "scores": "[0.5, 2]"}]
    (ranking,) = read_dataset(write_csv(tmp_path / "rank.csv", ranked)).records
    assert isinstance(ranking, Ranking)
    assert ranking.scores == (2.0, 0.5)
    (tmp_path / "tabs.tsv").write_text("question\tanswer\na\tb\n")
    assert len(read_dataset(tmp_path / "tabs.tsv")) == 1
    rows[1]["label"] = "maybe"
    with pytest.raises(DataError, match=r"kto.csv, row 2, field label: must be true or false.*'maybe'"):
        read_dataset(write_csv(tmp_path / "kto.csv", rows))


def test_a_folder_and_a_glob_are_one_data_set(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", [{"text": "2"}])
    jsonl(tmp_path / "a.jsonl", [{"text": "1"}])
    (tmp_path / "README.md").write_text("About.")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    folder = read_dataset(tmp_path)
    assert [r.text for r in folder.records] == ["1", "2"]
    assert folder.description.endswith("2 texts (column text; left out README.md)")
    assert read_dataset(tmp_path / "*.jsonl").fingerprint == folder.fingerprint
    jsonl(tmp_path / "c.jsonl", [{"text": "3"}, {"txt": "4"}])
    with pytest.raises(DataError, match=r"c.jsonl, line 2, field text: is missing; .*Did you mean 'txt'"):
        read_dataset(tmp_path)


# -- columns ----------------------------------------------------------------------------------------------

PAIRS = [
    {"prompt": "q", "chosen": chat("q", "a"), "rejected": chat("q", "b"), "score_chosen": 3.0,
     "score_rejected": None},
    {"prompt": "q2", "chosen": chat("q2", "a"), "rejected": chat("q2", "b"), "score_chosen": 3.0,
     "score_rejected": 1.0},
]  # fmt: skip


def check_pairs(path: Path) -> None:
    data = read_dataset(path)
    assert [r.margin for r in data.records] == [None, 2.0]
    assert data.records[0] == Preference(
        (Message("user", "q"),), (Message("assistant", "a"),), (Message("assistant", "b"),)
    )
    assert (
        "2 preferences (columns prompt, chosen, rejected, score_chosen, score_rejected)" in data.description
    )


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(PAIRS), tmp_path / "p.parquet")
    check_pairs(tmp_path / "p.parquet")
    broken = [*PAIRS, PAIRS[0] | {"chosen": None}]
    pyarrow.parquet.write_table(arrow.Table.from_pylist(broken), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p.parquet, row 3, field chosen: must not be null"):
        read_dataset(tmp_path / "p.parquet")


def save_to_disk(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """What `Dataset.save_to_disk` leaves: shards in Arrow's stream format, named in order by state.json."""
    import pyarrow as arrow

    folder.mkdir(parents=True)
    names = []
    for i, row in enumerate(rows):
        names.append(f"data-{9 - i:05}-of-00002.arrow")  # the order is that of state.json, not of names
        table = arrow.Table.from_pylist([row], schema=arrow.Table.from_pylist(rows).schema)
        with (
            arrow.OSFile(str(folder / names[-1]), "wb") as sink,
            arrow.ipc.new_stream(sink, table.schema) as out,
        ):
            out.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_datasets_folder(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    check_pairs(save_to_disk(tmp_path / "saved", PAIRS))
    save_to_disk(tmp_path / "dict" / "train", PAIRS)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    check_pairs(tmp_path / "dict")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, such as .*dict/train"):
        read_dataset(tmp_path / "dict")
    with arrow.OSFile(str(tmp_path / "f.feather"), "wb") as sink:
        table = arrow.Table.from_pylist(PAIRS)
        with arrow.ipc.new_file(sink, table.schema) as out:
            out.write_table(table)
    check_pairs(tmp_path / "f.feather")


def test_fault_128_a_saved_folder_names_no_file_outside_itself(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    save_to_disk(tmp_path / "out", PAIRS)
    inside = tmp_path / "in"
    inside.mkdir()
    names = ["../out/data-00009-of-00002.arrow"]
    (inside / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    with pytest.raises(DataError, match=r"in/data-00009-of-00002.arrow cannot be read"):
        read_dataset(inside)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_without_pyarrow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the package pyarrow.*pip install 'stepladder\[data\]'"):
        read_dataset(tmp_path / name)
