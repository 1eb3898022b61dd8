"""The files that reward models learn from, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from stepladder.data.budget import Tally
from stepladder.data.files.datasets import Dataset, read_dataset
from stepladder.data.files.records import Preference, Ranking, Record, Steps
from stepladder.data.files.split import fingerprint_of, repeated, split_by_content
from stepladder.errors import DataError

RankedRow: TypeAlias = Preference | Ranking
Report: TypeAlias = Callable[[str, str], None]  # (what became of the rows, their fingerprint)
Row = TypeVar("Row", bound=Record)
Sample = TypeVar("Sample")


def read_ranked(path: str) -> Dataset[RankedRow]:
    """The records of a file of preferences or rankings. Raises DataError for any other file."""
    found = read_dataset(path, ambiguous_as="ranking")
    if found.kind not in ("preference", "ranking"):
        found = read_dataset(path, kind="preference")  # made from it where that is possible, else refused
    return found


def read_steps(path: str) -> Dataset[Steps]:
    """The records of a file of labelled solutions. Raises DataError for a row without labels."""
    found = read_dataset(path, kind="steps")
    bare = next((i for i, row in enumerate(found.records) if len(row.labels) != len(row.steps)), None)
    if bare is not None:
        raise DataError(
            f"{path}: row {bare + 1} has {len(found.records[bare].labels)} labels for "
            f"{len(found.records[bare].steps)} steps; give each step one, or set "
            "process_reward_model.monte_carlo.tasks, so that rollouts in an environment make them"
        )
    return found


def check_count(section: str, found: Dataset[Any], validation: int) -> None:
    """Raise DataError where the validation holds all rows of a file back."""
    if len(found) <= validation:
        raise DataError(
            f"{section}.data has {len(found)} rows, {section}.validation holds back {validation}"
            f"; try {section}.validation = {len(found) // 5}"
        )


def split_and_encode(
    rows: Sequence[Row],
    said: str,
    validation: int,
    seed: int,
    encode: Callable[[Sequence[Row], str, Tally], list[Sample]],
    report: Report,
) -> tuple[list[Sample], list[Sample]]:
    """(training, validation) samples of rows with no prompt in common; what became of the rows is reported.

    `said` is what there is to say of their file; `encode(rows, "train" or "held", tally)` makes the samples.
    """
    train, held = split_by_content(rows, validation, seed)
    tally = Tally()
    encoded = encode(train, "train", tally), encode(held, "held", tally)
    again = repeated(len(rows) - len(train) - len(held))
    report("; ".join(filter(None, (said, again, tally.text))), fingerprint_of([*train, *held]))
    return encoded
