"""Rows of data files as they lie on disk: JSON Lines, JSON, CSV, Parquet, saved `datasets`, folders, globs.

A row is a plain dictionary with the words that name it in errors: "pairs.jsonl, line 7" for text files of
lines, "pairs.parquet, row 7" for the rest (the first row is row 1). Nothing is interpreted here.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from stepladder.errors import ConfigError, DataError

RawRow: TypeAlias = tuple[Mapping[str, Any], str]  # (the row, the words that name it)


def read_rows(path: str | Path) -> tuple[list[RawRow], list[str]]:
    """(rows, names of files that were left out) of a file, a folder, a glob or a saved `datasets` folder.

    Raises `DataError` for what cannot be read, naming file and row, and when there is no row at all;
    `ConfigError` where a package is missing.
    """
    files, left_out = _files(Path(path))
    rows = [row for file in files for row in _read_file(file)]
    if not rows:
        raise DataError(f'{path} holds no rows; give one JSON object per line, such as {{"messages": [...]}}')
    return rows, left_out


def refuse(where: str, must: str, value: Any) -> NoReturn:
    """Raise `DataError`: where, what it must be, what was received."""
    raise DataError(f"{where}: {must}; got {str(value)[:80]!r}")


def loads(text: str, where: str) -> Any:
    """JSON, with the place named in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not valid JSON ({str(problem)[:100]})") from problem


# -- which files ------------------------------------------------------------------------------------------


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """(files in order, names left out)."""
    if path.is_dir():
        return _folder(path)
    if not path.exists() and re.search(r"[*?\[]", str(path)):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise DataError(f"{path} matches no file; give a pattern such as data/*.jsonl")
        return found, []
    return [path], []


def _folder(path: Path) -> tuple[list[Path], list[str]]:
    if (path / "dataset_dict.json").is_file():
        splits = [
            str(s)
            for s in json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        ]
        if len(splits) != 1:
            raise DataError(
                f"{path} holds the splits {', '.join(splits)}; name one, such as {path}/{splits[0]}"
            )
        path = path / splits[0]
    if (path / "state.json").is_file():
        state = loads((path / "state.json").read_text(encoding="utf-8"), f"{path / 'state.json'}")
        names = [entry["filename"] for entry in state.get("_data_files", [])]
        # A name from a file is only a name: it may not lead out of the folder.
        return [path / Path(name).name for name in names], []
    inside = sorted(
        f  # not from hidden folders either: editors and download tools keep old copies there
        for f in path.rglob("*")
        if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)
    )
    files = [f for f in inside if _reader(f) is not None]
    if not files:
        raise DataError(f"{path} holds no data file; a file ends in one of {', '.join(_READERS)}")
    return files, [f.name for f in inside if _reader(f) is None]


def _reader(path: Path) -> Callable[[Path], Iterator[RawRow]] | None:
    return _READERS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix.lower())


def _read_file(path: Path) -> Iterator[RawRow]:
    reader = _reader(path)
    if reader is None:
        raise DataError(f"{path} is of no known type; a file ends in one of {', '.join(_READERS)}")
    return reader(path)


# -- text -------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    """The text of a file without its byte-order mark."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(f"{path} cannot be read: {reason}") from problem
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        hint = "; it looks like UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(
            f"{path}, line {line}: not UTF-8 text ({problem.reason} 0x{data[problem.start]:02x}){hint}; "
            "save it as UTF-8"
        ) from problem


def _objects(values: Iterator[tuple[Any, str]]) -> Iterator[RawRow]:
    for value, where in values:
        if not isinstance(value, Mapping):
            refuse(where, 'must be a JSON object such as {"messages": [...]}', value)
        yield value, where


def _json_lines(path: Path) -> Iterator[RawRow]:
    return _objects(_lines(_text(path), path))


def _lines(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    # Not splitlines(): it also breaks at U+2028, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield loads(line, f"{path}, line {number}"), f"{path}, line {number}"


def _json(path: Path) -> Iterator[RawRow]:
    """A list of rows, an object with one such list (an export's "data"), or JSON Lines under this name."""
    text = _text(path)
    if not text.strip():
        return iter(())
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith("{") and "\n" in text.strip():
            return _objects(_lines(text, path))
        whole = loads(text, str(path))
    if isinstance(whole, Mapping):
        lists = [v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], Mapping)]
        rows_themselves = {"messages", "conversations", "conversation", "chosen", "completions", "completion"}
        if rows_themselves & set(whole):
            whole = [whole]
        elif len(lists) == 1:
            whole = lists[0]
    if not isinstance(whole, list):
        refuse(str(path), "must be a JSON list of rows", whole)
    return _objects((row, f"{path}, row {i}") for i, row in enumerate(whole, start=1))


def _csv(path: Path) -> Iterator[RawRow]:
    """A header and rows; a line break may stand inside quotes. Cells stay strings."""
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = [name.strip() for name in cells]
                twice = [name for name, n in Counter(header).items() if n > 1]
                if twice:
                    refuse(f"{path}, header", f"names a column twice, {twice[0]!r}; rename one", header)
                continue
            number += 1
            if len(cells) != len(header):
                refuse(
                    f"{path}, row {number} (line {reader.line_num})",
                    f"must have {len(header)} cells, one for each of {', '.join(header)}",
                    f"{len(cells)} cells",
                )
            yield dict(zip(header, cells, strict=True)), f"{path}, row {number}"
    except csv.Error as problem:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({problem})") from problem


# -- columns ----------------------------------------------------------------------------------------------


def _arrow_package(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise ConfigError(
            f"{path} needs the package pyarrow to be read: pip install 'stepladder[data]', or save the data "
            "as JSON Lines (.jsonl)"
        ) from problem
    return pyarrow


def _parquet(path: Path) -> Iterator[RawRow]:
    arrow = _arrow_package(path)
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield from _batches(file.iter_batches(batch_size=1024), path)
    except (OSError, arrow.ArrowException) as problem:
        raise DataError(f"{path} cannot be read as Parquet: {str(problem)[:200]}") from problem


def _arrow(path: Path) -> Iterator[RawRow]:
    """The stream that `save_to_disk` writes, or an Arrow file with a footer (Feather)."""
    arrow = _arrow_package(path)
    try:
        with arrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                file = arrow.ipc.open_file(source)
                yield from _batches((file.get_batch(i) for i in range(file.num_record_batches)), path)
            else:
                source.seek(0)
                yield from _batches(arrow.ipc.open_stream(source), path)
    except (OSError, arrow.ArrowException) as problem:
        raise DataError(f"{path} cannot be read as Arrow: {str(problem)[:200]}") from problem


def _batches(batches: Any, path: Path) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield {name: _without_nulls(value) for name, value in row.items()}, f"{path}, row {number}"


def _without_nulls(value: Any) -> Any:
    """Without the fields of structs that are null: a column has one type, so that each call of a tool would
    have the arguments of every other."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
