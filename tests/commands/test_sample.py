"""`stepladder sample`: training files from an endpoint that teaches, and from a run."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from spine import digit_recipe, lines
from test_commands import endpoint

from stepladder.commands import sample
from stepladder.commands.sample import SampleSettings, sample_files
from stepladder.data.files.datasets import read_dataset
from stepladder.errors import ConfigError, EngineError
from stepladder.ladder import train
from stepladder.run.progress import Display
from stepladder.types import Trajectory

SMALL: dict[str, Any] = {
    "overrides": ["rollout.max_turns=2"],
    "n": 3,
    "tasks": 4,
    "split": "train",
    "temperature": 1.0,
    "seed": 0,
    "selection": {"keep": "all", "cap": 2, "require": "auto", "beta": None},
    "reward": None,
}


def sampled(model: str, out: Path, **changes: Any) -> dict[str, int]:
    settings = {**SMALL, "endpoint_model": "teacher", "environment": "calculator", **changes}
    console = Console(file=io.StringIO())
    return sample_files(model, SampleSettings(**settings), out=out, console=console)


def solver(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Says a number that differs by the seed; a few of them are wrong in different words."""
    text = f"I think it is {body['seed'] % 5}."
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


def few_words(trajectory: Trajectory) -> float:
    return 1.0 + int(trajectory.messages[-1].text.rstrip(".").split()[-1]) / 10


def test_a_teacher_behind_an_endpoint_writes_files_for_sft(tmp_path: Path) -> None:
    """Scored by a reward, any number counts: the two best of each task, and a pair where they differ."""
    selection = {"keep": "best", "cap": 2, "require": "scored", "beta": None}
    with endpoint(solver) as (url, bodies):
        tally = sampled(url, tmp_path / "s", selection=selection, reward=f"{__file__}:few_words")
    assert {body["model"] for _, body in bodies} == {"teacher"}
    assert tally["sampled"] == 12
    rows = read_dataset(tmp_path / "s" / "accepted.jsonl", "demonstration").records
    assert len(rows) == tally["accepted"]
    assert {tool.name for row in rows for tool in row.tools} == {"calculator"}
    kept = lines(tmp_path / "s" / "accepted.jsonl")
    played = lines(tmp_path / "s" / "trajectories.jsonl")
    for task in {row["task"] for row in kept}:
        own = sorted((row["score"] for row in kept if row["task"] == task), reverse=True)
        every = sorted({t["score"]["value"] for t in played if t["task"]["id"] == task}, reverse=True)
        assert own == every[:2]
    pairs = lines(tmp_path / "s" / "pairs.jsonl")
    assert len(pairs) == tally["pairs"]
    assert all(p["score_chosen"] > p["score_rejected"] for p in pairs)


def test_a_run_writes_files_and_does_not_write_over_them(tmp_path: Path) -> None:
    short = ("rl=null", "evaluation.raw=0", "evaluation.tasks=2", "sft.epochs=4")
    run = train(digit_recipe(tmp_path, "run", *short), display=Display(quiet=True))
    options = {"environment": "hidden_digit", "tasks": 20, "overrides": []}
    tally = sampled(str(run), tmp_path / "s", **options)
    assert tally["accepted"] > 0
    assert tally["sampled"] == len(lines(tmp_path / "s" / "trajectories.jsonl")) == 60
    again = sampled(str(run), tmp_path / "again", **options)
    assert again == tally
    assert lines(tmp_path / "s" / "accepted.jsonl") == lines(tmp_path / "again" / "accepted.jsonl")
    with pytest.raises(ConfigError, match=r"accepted\.jsonl exists"):
        sampled(str(run), tmp_path / "s", **options)


def test_an_endpoint_that_died_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two tasks; the third batch finds nobody, and the lines of a kill in between are cut."""
    monkeypatch.setattr(sample, "BATCH", 2)
    asked = {"tasks": 7, "selection": {"keep": "all", "cap": 2, "require": "scored", "beta": None}}
    answered = itertools.count()
    broken = tmp_path / "broken"

    def dies(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return solver(body) if next(answered) < 4 * 3 else (500, {})

    with endpoint(dies) as (url, _), pytest.raises(EngineError, match="the same command goes on"):
        sampled(url, broken, **asked)
    with endpoint(solver) as (url, bodies):
        whole = sampled(url, tmp_path / "whole", **asked)
        bodies.clear()
        assert len(lines(broken / "trajectories.jsonl")) == 12
        with (broken / "accepted.jsonl").open("a") as file:
            file.write('{"half a line')
        with pytest.raises(ConfigError, match="exists, and is finished or of other settings"):
            sampled(url, broken, **asked, seed=1)
        assert not bodies
        assert sampled(url, broken, **asked) == whole
        assert len(bodies) == 3 * 3
    for name in ("accepted.jsonl", "pairs.jsonl", "trajectories.jsonl"):
        assert lines(broken / name) == lines(tmp_path / "whole" / name)


def test_an_endpoint_that_is_dead_from_the_start_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    with endpoint(lambda body: (500, {})) as (url, _), pytest.raises(EngineError):
        sampled(url, tmp_path / "s")
    with endpoint(solver) as (url, _):
        assert sampled(url, tmp_path / "s", seed=3)["sampled"] == 12


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"keep": "first"}, r"--keep: .*'first'"),
        ({"keep": "all", "beta": 0.1}, 'set keep = "statistical"'),
        ({"cap": 0}, r"--cap: .*got 0"),
    ],
)
def test_a_selection_that_means_nothing_is_refused(
    tmp_path: Path, selection: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sampled("nowhere", tmp_path / "s", selection=selection)
