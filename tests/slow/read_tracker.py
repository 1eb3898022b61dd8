"""What a tracker holds of a run, read with its own package: python read_tracker.py KIND RUN_FOLDER NAME

Prints JSON: metric -> its values in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Values = dict[str, list[float]]


def tensorboard(folder: Path, name: str) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb(folder: Path, name: str) -> Values:
    """The history records of the offline file, with the package's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    values: Values = {}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            key = item.key or ".".join(item.nested_key)
            number = json.loads(item.value_json)
            if not key.startswith("_"):
                values.setdefault(key, []).append(number)
    return values


def trackio(folder: Path, name: str) -> Values:
    from trackio.sqlite_storage import SQLiteStorage

    values: Values = {}
    for row in SQLiteStorage.get_logs("stepladder", name):
        for key, number in row.items():
            if key not in ("step", "timestamp"):
                values.setdefault(key, []).append(number)
    return values


if __name__ == "__main__":
    kind, folder, name = sys.argv[1:]
    print(
        json.dumps({"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}[kind](Path(folder), name))
    )
