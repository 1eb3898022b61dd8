"""The files that reward models learn from."""

from __future__ import annotations

import logging
from typing import TypeAlias

from stepladder.data.datasets import read_dataset
from stepladder.data.records import Preference, Ranking, Steps
from stepladder.errors import DataError

log = logging.getLogger("stepladder")

RankedRow: TypeAlias = Preference | Ranking


def read_ranked(path: str) -> list[RankedRow]:
    """The records of a file of preferences or rankings. Raises DataError for any other file."""
    found = read_dataset(path)
    if found.kind not in ("preference", "ranking"):
        found = read_dataset(path, kind="preference")  # made from it where that is possible, else refused
    log.info("%s", found.description)
    return list(found.records)


def read_steps(path: str) -> list[Steps]:
    """The records of a file of labelled solutions. Raises DataError for a row without labels."""
    found = read_dataset(path, kind="steps")
    bare = next((i for i, row in enumerate(found.records) if len(row.labels) != len(row.steps)), None)
    if bare is not None:
        raise DataError(
            f"{path}: solution {bare} has {len(found.records[bare].labels)} labels for "
            f"{len(found.records[bare].steps)} steps; give each step one, or set process_reward_model.tasks, "
            "so that rollouts in an environment make them"
        )
    log.info("%s", found.description)
    return list(found.records)
