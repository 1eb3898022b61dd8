"""The files that reward models learn from, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stepladder.data.datasets import Dataset, read_dataset
from stepladder.data.records import Preference, Ranking, Steps
from stepladder.errors import DataError

RankedRow: TypeAlias = Preference | Ranking
Report: TypeAlias = Callable[[str, str], None]  # (what became of the rows, their fingerprint)


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
            f"{len(found.records[bare].steps)} steps; give each step one, or set process_reward_model.tasks, "
            "so that rollouts in an environment make them"
        )
    return found
