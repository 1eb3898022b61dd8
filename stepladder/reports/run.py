"""Reading a run folder, also one that is being written or whose process was killed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepladder.errors import DataError

METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
EVALUATIONS = "evaluations.jsonl"
RECIPE = "recipe.toml"
DATA = "data.json"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """What a report is made from: the lines of the run's logs, and what each rung was trained on."""

    path: Path
    metrics: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    recipe: str
    environment: Record
    alarms: tuple[Record, ...] = ()
    data: dict[str, Record] = field(default_factory=dict)


def read_run(path: Path) -> RunData:
    """Read a run folder. Raises DataError when the folder is no run or a line in it is broken."""
    path = Path(path)
    if not (path / RECIPE).is_file():
        raise DataError(f"{path} is no run folder: it holds no {RECIPE}; name the folder a run printed.")
    environment, data = path / "environment.json", path / DATA
    return RunData(
        path=path,
        metrics=tuple(read_jsonl(path / METRICS)),
        evaluations=tuple(read_jsonl(path / EVALUATIONS)),
        alarms=tuple(read_jsonl(path / ALARMS)),
        recipe=(path / RECIPE).read_text(encoding="utf-8"),
        environment=json.loads(environment.read_text(encoding="utf-8")) if environment.is_file() else {},
        data=json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {},
    )


def read_jsonl(path: Path) -> list[Record]:
    """The records of a .jsonl file, none if it is missing. A last line without its end is left out: it is
    being written, or its writer was killed. Raises DataError for any other broken line.
    """
    if not path.is_file():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: nothing, or a torn line
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}.") from error
    return records
