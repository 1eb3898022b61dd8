"""Each training file is opened once per run: the checks before the model is loaded and the rung share it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import scoring_runs as runs
from spine import digit_recipe

from stepladder import ladder
from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld
from stepladder.run.progress import Display
from stepladder.workbench.sources import Sources

OPENED: Counter[str] = Counter()
WATCHED: set[str] = set()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and isinstance(args[0], str | Path) and str(args[0]) in WATCHED:
        OPENED[str(args[0])] += 1


sys.addaudithook(_audit)


@pytest.fixture
def opened() -> Any:
    """Count how often each path in `WATCHED` is opened by anyone in this process."""
    OPENED.clear()
    yield OPENED
    WATCHED.clear()


def test_the_counter_counts(tmp_path: Path, opened: Counter[str]) -> None:
    path = tmp_path / "a"
    WATCHED.add(str(path))
    path.write_text("x")
    path.read_text()
    assert opened[str(path)] == 2


@pytest.mark.parametrize("section", ["reward_model", "process_reward_model", "preference"])
def test_rows_of_a_rung_are_read_once(tmp_path: Path, section: str, opened: Counter[str]) -> None:
    write = runs.write_steps if section == "process_reward_model" else runs.write_pairs
    data = write(tmp_path / "rows.jsonl", 40)
    recipe = runs.recipe(tmp_path, "run", section, data, f"{section}.epochs=1", f"{section}.validation=8")
    WATCHED.add(str(data))
    runs.train(recipe)
    assert opened[str(data)] == 1


def test_conversations_are_read_once_for_sft_and_for_its_replay(tmp_path: Path, opened: Counter[str]) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{"role": m.role, "content": m.text} for m in conversation]}
        for conversation in HiddenDigitWorld().demonstrations(24, 0)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"sft.data={data}", "sft.demonstrations=0", "sft.epochs=1", "sft.validation=4")
    recipe = digit_recipe(tmp_path, "run", *given, "rl.steps=1", "rl.replay.weight=0.5", "evaluation.raw=0")
    WATCHED.add(str(data))
    ladder.train(recipe, display=Display(quiet=True))
    assert opened[str(data)] == 1


def test_what_was_made_from_other_arguments_is_made_anew() -> None:
    made: list[int] = []

    def make(n: int) -> list[int]:
        made.append(n)
        return [n]

    sources = Sources()
    assert sources.once(make, 1) is sources.once(make, 1)
    assert sources.once(make, 2) == [2]
    assert made == [1, 2]
