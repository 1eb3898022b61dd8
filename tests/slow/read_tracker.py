"""What a tracker holds of a run, read with its own package: python read_tracker.py KIND RUN_FOLDER NAME

Prints JSON: metric -> its values in order.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

Values = dict[str, list[float]]


def tensorboard(folder: Path, name: str) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb(folder: Path, name: str) -> Values:
    """The history records of the offline file: the package's own messages, in the log format it writes."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    values: Values = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            key = item.key or ".".join(item.nested_key)
            if not key.startswith("_"):
                values.setdefault(key, []).append(json.loads(item.value_json))
    return values


def log_records(raw: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB; each piece has a checksum, a length and a kind.

    Kinds: 1 whole, 2 first, 3 middle, 4 last. The file begins with a header of 7 bytes of its own.
    """
    position, whole = 7, b""
    while position + 7 <= len(raw):
        left = 32768 - position % 32768
        if left < 7:  # no room for a piece: the rest of the block is padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", raw, position + 4)
        if kind == 0:
            position += left
            continue
        whole += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


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
