"""Relative paths of a recipe are recorded absolute: a run goes on, and is played, from any folder."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from interruptions import Crash, at_call, crash
from spine import digit_recipe

from stepladder import ladder
from stepladder.commands.playground import playground_recipe
from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld
from stepladder.errors import ConfigError
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display
from stepladder.run.training_files import chat
from stepladder.rungs.rl import loop as rl
from stepladder.workbench.paths import anchored, model_path, refuse_own_inputs

WORLD = """
from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld


class Mine(HiddenDigitWorld):
    pass


def nothing(trajectory):
    return 0.0
"""


def test_a_run_with_relative_paths_is_resumed_and_evaluated_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    Path("world.py").write_text(WORLD)
    rows = [{"messages": chat(c)} for c in HiddenDigitWorld().demonstrations(48, 0)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = ladder.train(
        digit_recipe(Path(), "start", "rl=null", "sft.epochs=1"), display=Display(quiet=True)
    )
    shutil.copytree(start / "final", "model")
    given = (
        "model={name = 'model', dtype = 'float32'}",
        "environment={name = 'world.py:Mine', rewards = ['world.py:nothing']}",
        "sft.data=rows.jsonl",
        "sft.demonstrations=0",
        "sft.validation=1",
    )
    with monkeypatch.context() as patch:
        at_call(patch, rl, "rl_update", 2, crash, after=True)
        with pytest.raises(Crash):
            ladder.train(digit_recipe(Path("runs"), "run", *given), display=Display(quiet=True))
    monkeypatch.chdir(elsewhere)
    run = ladder.resume(here / "runs" / "run", display=Display(quiet=True))
    assert (run / "final").is_dir()
    recorded = tomllib.loads((run / "recipe.toml").read_text())
    assert recorded["model"]["name"] == str(here / "model")
    assert recorded["environment"]["name"] == f"{here / 'world.py'}:Mine"
    assert recorded["environment"]["rewards"] == [f"{here / 'world.py'}:nothing"]
    assert recorded["sft"]["data"] == str(here / "rows.jsonl")
    # `eval` keeps a run's options where the same world is asked for, named as it was.
    monkeypatch.chdir(here)
    again = playground_recipe("runs/run", "world.py:Mine", (), seed=0, endpoint_model="")
    assert again.environment.rewards == (f"{here / 'world.py'}:nothing",)


def recipe(**sections: Any) -> Any:
    return load_recipe({"sft": {"demonstrations": 4}, "environment": {"name": "calculator"}} | sections)


def test_names_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert [model_path(name) for name in ("tiny", "org/model", "smollm2-135m-instruct")] == [
        "tiny",
        "org/model",
        "smollm2-135m-instruct",
    ]
    plain = recipe(preference={"data": "rejection_sampling"}, rejection_sampling={"tasks": 4})
    assert anchored(plain) == plain


def test_globs_reward_models_own_functions_and_mixed_worlds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rm").mkdir()
    worlds = [{"name": "w.py:World", "weight": 2}, {"name": "calculator"}]
    made = anchored(
        recipe(
            sft={"data": "data/*.jsonl"},
            environment={
                "name": "mixed",
                "options": {"worlds": worlds},
                "rewards": ["reward_model:rm,org/rm?combine=min", "package.module:reward"],
            },
            rl={"loss": "own.py:loss", "credit": {"advantage": "package:advantage"}},
        )
    )
    assert made.sft.data == f"{tmp_path}/data/*.jsonl"
    assert made.environment.rewards == (
        f"reward_model:{tmp_path}/rm,org/rm?combine=min",
        "package.module:reward",
    )
    assert made.environment.options["worlds"] == [
        {"name": f"{tmp_path}/w.py:World", "weight": 2, "label": "w.py:World"},  # its domains keep their name
        {"name": "calculator"},
    ]
    assert (made.rl.loss, made.rl.credit.advantage) == (f"{tmp_path}/own.py:loss", "package:advantage")


SCORER = "reward_model:org/rm,runs/x/final?combine=min"


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.name", {"model": {"name": "runs/x/final"}}),
        ("model.name", {"model": {"name": "runs/x"}}),
        ("model.name", {"model": {"name": "link"}}),
        ("sft.data", {"sft": {"data": "runs/x/pairs.jsonl"}}),
        ("sft.data", {"sft": {"data": "runs/*/*.jsonl"}}),
        ("sft.data", {"sft": {"data": "runs"}}),  # a folder is read with all below it
        ("preference.data", {"preference": {"data": "runs/x/pairs.jsonl"}}),
        ("distillation.teacher", {"distillation": {"teacher": "runs/x", "steps": 1}}),
        (
            "environment.rewards",
            {"environment": {"name": "calculator", "rewards": ["reward_model:runs/x/final"]}},
        ),
        ("environment.name", {"environment": {"name": "runs/x/world.py:World"}}),
        ("rl.loss", {"rl": {"loss": "runs/x/world.py:loss"}}),
    ],
)
def test_what_the_recipe_reads_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, sections: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/x/final").mkdir(parents=True)
    Path("link").symlink_to("runs/x/final")
    for name in ("pairs.jsonl", "world.py"):
        Path("runs/x", name).write_text("")
    made = recipe(**sections)
    with pytest.raises(
        ConfigError, match=rf"{key} = .*(lies in|holds) the run folder runs/x.*run\.name = 'x-2'"
    ):
        refuse_own_inputs(made, Path("runs/x"))
    if sections != {"sft": {"data": "runs"}}:
        refuse_own_inputs(made, Path("runs/y"))
    monkeypatch.chdir("runs/x")  # where "tiny" and "calculator" are names, no files
    refuse_own_inputs(recipe(model={"name": "tiny"}), Path())


def test_overwriting_the_model_that_is_trained_on_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ladder.train(
        digit_recipe(tmp_path, "run", "rl=null", "sft.epochs=1"), display=Display(quiet=True)
    )
    on = digit_recipe(tmp_path, "run", "sft=null", f"model={{name = '{first}', dtype = 'float32'}}")
    monkeypatch.setattr(ladder, "prepare_run", lambda recipe: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match=r"model\.name = .*which overwrite would delete"):
        ladder.train(on, overwrite=True, display=Display(quiet=True))
    assert (first / "final").is_dir()
