"""How far `stepladder sample` has come, so that the same command goes on where it was stopped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepladder.atomic import write_file
from stepladder.errors import ConfigError
from stepladder.run.records import encode_line
from stepladder.run.training_files import ACCEPTED, PAIRS
from stepladder.rungs.rejection_sampling.selection import Seen

NOTE = "sample.json"
FILES = (ACCEPTED, PAIRS, "trajectories.jsonl")


@dataclass(slots=True)
class SampleNote:
    """What is in the folder: `done` tasks, in files of so many bytes. What lies behind those is half written.

    Another command goes on with them where it shares the settings `asked`.
    """

    folder: Path
    asked: dict[str, Any]
    done: int = 0
    tally: dict[str, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, asked: Mapping[str, Any], tasks: int) -> SampleNote:
        """Begin, or go on, with files cut back to what is done.

        Raises ConfigError where `folder` holds files of other settings, or all that is asked for.
        """
        note = cls(folder, json.loads(encode_line(asked)))
        present = [name for name in FILES if (folder / name).exists()]
        if (folder / NOTE).is_file():
            old = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            if old["asked"] == note.asked and old["done"] < tasks:
                seen = Seen(set(old["contents"]), Counter(old["accepted"]))
                note.done, note.tally, note.seen, note.sizes = old["done"], old["tally"], seen, old["sizes"]
                present = []
        if present:
            raise ConfigError(
                f"{folder / present[0]} exists, and is finished or of other settings; choose another folder, "
                "or delete it"
            )
        for name in FILES:
            if (folder / name).exists():
                os.truncate(folder / name, note.sizes.get(name, 0))
        return note

    def add(self, rows: Mapping[str, Sequence[Any]], tasks: int) -> None:
        """Write the lines of each file, then that `tasks` more are done."""
        for name, lines in rows.items():
            with (self.folder / name).open("ab") as file:
                file.writelines(encode_line(line) for line in lines)
                self.sizes[name] = file.tell()
        self.done += tasks
        self.save()

    def save(self) -> None:
        """Replace the note in one step."""
        data = {
            "asked": self.asked,
            "done": self.done,
            "tally": self.tally,
            "sizes": self.sizes,
            "contents": sorted(self.seen.contents),
            "accepted": self.seen.tasks,
        }
        write_file(self.folder / NOTE, encode_line(data).decode("ascii"))
