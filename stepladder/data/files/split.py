"""Rows by what they say: a key for each, duplicates, and a split whose sides have nothing in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from stepladder.data.files.records import Demonstration, Record, Steps, Text
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message

R = TypeVar("R", bound=Record)


def content_key(record: Record) -> str:
    """A hash of all that a record says; equal records have equal keys, in any process."""
    return _hash([type(record).__name__, _plain(record)])


def fingerprint_of(records: Iterable[Record]) -> str:
    """A hash of the records in their order: changes when anything a trainer sees changes."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(content_key(record).encode())
    return digest.hexdigest()


def split_key(record: Record) -> str:
    """What may not stand on both sides of a split: the prompt, or all of a conversation or text.

    Two answers to one prompt would otherwise be seen in training and asked in the test.
    """
    if isinstance(record, Text):
        return _hash(record.text.split())
    messages: Sequence[Message]
    if isinstance(record, Demonstration):
        messages = record.messages[: record.answers_from or len(record.messages)]
    else:
        messages = record.prompt
    said = [asdict(m) for m in messages]
    for message in said:  # the same words in another layout are the same conversation
        if isinstance(message["content"], str):
            message["content"] = message["content"].split()
    return _hash(said)


def dedupe(records: Sequence[R]) -> list[R]:
    """The records without repetitions, the first of equal ones kept; `len` tells how many went."""
    first: dict[str, R] = {}
    for record in records:
        first.setdefault(content_key(record), record)
    return list(first.values())


def repeated(count: int) -> str:
    """What is said of rows that were left out because they stood there before; "" of none.

    >>> repeated(1)
    '1 repeated row left out'
    """
    return f"{count:,} repeated row{'s' * (count > 1)} left out" if count else ""


def split_by_content(records: Sequence[R], held_out: int | float, seed: int) -> tuple[list[R], list[R]]:
    """(train, held out), each without repetitions and in the order of the file; see `split_key`.

    `held_out` as a float in [0, 1) is a share: the side of a row follows from its content and the seed alone,
    whatever else the file holds, and its size is only near the share. As an int it is a number of rows: those
    whose hashes come first. Rows that belong together go together; what would pass the number is passed over.

    Raises `ConfigError` for a share or number that makes no sense, `DataError` when nothing would be left to
    train on or to hold out.
    """
    rows = dedupe(records)
    keys = [split_key(row) for row in rows]
    if isinstance(held_out, bool) or held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ConfigError(
            f"held_out={held_out!r} is neither a share below 1 nor a number of rows; try 0.05 or 16"
        )
    places = {key: _place(key, seed) for key in keys}
    if isinstance(held_out, float):
        chosen = {key for key, place in places.items() if place < held_out}
    else:
        chosen = _first(keys, places, held_out)
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = [row for row, key in zip(rows, keys, strict=True) if key in chosen]
    if not train or (isinstance(held_out, int) and held_out and not held):
        raise DataError(
            f"{held_out} of {len(rows)} different rows ({len(places)} different prompts) cannot be held out: "
            f"{'nothing would be left to train on' if not train else 'they all belong together'}; "
            f"hold out {len(places) // 5} or give more rows"
        )
    return train, held


def _first(keys: Sequence[str], places: dict[str, float], count: int) -> set[str]:
    sizes: dict[str, int] = {}
    for key in keys:
        sizes[key] = sizes.get(key, 0) + 1
    chosen: set[str] = set()
    for key in sorted(places, key=lambda k: (places[k], k)):
        if sizes[key] <= count:
            chosen.add(key)
            count -= sizes[key]
    return chosen


def _place(key: str, seed: int) -> float:
    """A number in [0, 1) that the key and the seed decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:7], "big") / 2**56


def _plain(record: Record) -> Any:
    """The record as plain data; of a tool what the model is shown, not its function."""
    if isinstance(record, Text | Steps):
        return asdict(record)
    return asdict(replace(record, tools=())) | {"tools": [tool.to_dict() for tool in record.tools]}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
