"""What cannot be split, or has no steps for its schedule, is refused before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepladder.data.files.records import Preference, Steps
from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld
from stepladder.errors import ConfigError, DataError
from stepladder.recipe.config import load_recipe
from stepladder.rungs.registry import prepare_run
from stepladder.types import Message
from stepladder.workbench import prepare as setup


class Loaded(Exception):
    """The model would have been loaded: all checks were passed."""


def words(i: int, repeat: int) -> str:
    return f"{i % repeat if repeat else i}?"


def check(monkeypatch: pytest.MonkeyPatch, section: str, *, repeat: int = 0, **keys: Any) -> None:
    """Prepare a run of one rung in a world that makes pairs and solutions, `repeat` different ones."""

    def preferences(self: Any, count: int, seed: int) -> list[Preference]:
        return [Preference(_said("user", words(i, repeat)), YES, NO) for i in range(count)]

    def step_solutions(self: Any, count: int, seed: int) -> list[Steps]:
        return [Steps(_said("user", words(i, repeat)), ("a",), (1.0,)) for i in range(count)]

    def load(recipe: Any) -> None:
        raise Loaded

    monkeypatch.setattr(HiddenDigitWorld, "preferences", preferences, raising=False)
    monkeypatch.setattr(HiddenDigitWorld, "step_solutions", step_solutions, raising=False)
    monkeypatch.setattr(setup, "build_policy", load)
    sections = {"environment": {"name": "hidden_digit"}, "model": {"name": "tiny"}, section: keys}
    prepare_run(load_recipe(sections))


def _said(role: Any, text: str) -> tuple[Message, ...]:
    return (Message(role, text),)


YES, NO = _said("assistant", "yes"), _said("assistant", "no")


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("preference", {"pairs": 16}, "pairs=16 leaves too little .*=16 pairs .* validation = 3"),
        # nine pairs are 18 answers; 16 held out leave two, to one prompt
        ("preference", {"pairs": 9, "loss": "kto"}, "pairs=9 leaves .*=16 answers .* validation = 4"),
        (
            "preference",
            {"pairs": 64, "loss": "kto", "validation": 3},
            "fewer than two pairs.* validation = 4",
        ),
        ("preference", {"pairs": 3, "loss": "kto", "validation": 4}, "pairs=3 leaves .* validation = 0"),
        ("reward_model", {"pairs": 32}, "pairs=32 leaves nothing .*=32 holds back .* validation = 6"),
        ("process_reward_model", {"solutions": 20}, "solutions=20 leaves nothing .*=32 .* validation = 4"),
        (
            "process_reward_model",
            {"monte_carlo": {"tasks": 8}},
            "tasks=8 with 4 solutions each leaves .* validation = 6",
        ),
        (
            "process_reward_model",
            {"monte_carlo": {"tasks": 1}, "validation": 2},
            "tasks=1 cannot be split.*tasks = 64",
        ),
    ],
)
def test_a_validation_that_takes_all_is_refused_with_the_recipe(
    section: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"environment": {"name": "hidden_digit"}, section: keys})


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("preference", {"pairs": 16, "validation": 3}),
        ("preference", {"pairs": 9, "loss": "kto", "validation": 4}),
        ("preference", {"pairs": 3, "loss": "kto", "validation": 0}),
        ("preference", {"pairs": 10, "loss": "kto"}),
        ("reward_model", {"pairs": 32, "validation": 6}),
        ("process_reward_model", {"solutions": 20, "validation": 4}),
        ("process_reward_model", {"monte_carlo": {"tasks": 8}, "validation": 6}),
    ],
)
def test_the_values_that_are_named_work(
    monkeypatch: pytest.MonkeyPatch, section: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(Loaded):
        check(monkeypatch, section, **keys)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("preference", {"pairs": 64}),
        ("reward_model", {"pairs": 64}),
        ("process_reward_model", {"solutions": 64}),
    ],
)
def test_made_rows_that_repeat_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, section: str, keys: dict[str, Any]
) -> None:
    message = rf"{section}\.validation=\d+: \d+ of 3 different rows .* nothing would be left to train on"
    with pytest.raises(DataError, match=message):
        check(monkeypatch, section, repeat=3, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [  # 48 pairs, or 96 answers, in three batches: all three steps warm up
        ({}, "=1 of 48 training rows .*batch_size=16 are 3 steps.*warmup_steps=3 .*epochs = 2"),
        ({"loss": "kto", "validation": 32, "batch_size": 32}, "of 96 training rows .* are 3 steps"),
        ({"warmup_steps": 0, "batch_size": 64}, "are 1 steps.*epochs = 2"),
    ],
)
def test_a_linear_schedule_without_room_is_refused_and_the_named_epochs_suffice(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str
) -> None:
    keys = {"pairs": 64, "schedule": "linear", **keys}
    with pytest.raises(ConfigError, match=message):
        check(monkeypatch, "preference", **keys)
    with pytest.raises(Loaded):
        check(monkeypatch, "preference", **keys, epochs=2)


def test_rows_of_a_file_that_repeat_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": words(i, 5), "chosen": "a", "rejected": "b"} for i in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for section in ("preference", "reward_model"):
        with pytest.raises(DataError, match=rf"{section}\.validation=\d+: \d+ of 5 different rows"):
            check(monkeypatch, section, data=str(file))
