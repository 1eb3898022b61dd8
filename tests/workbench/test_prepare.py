"""What a recipe becomes before anything is trained: its world, its settings, and what is refused."""

from __future__ import annotations

import inspect
import os
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from spine import digit_recipe, lines

from stepladder import ladder
from stepladder.errors import ConfigError
from stepladder.recipe.config import load_recipe
from stepladder.recipe.run import ModelSection
from stepladder.run.progress import Display
from stepladder.types import Message, Reset, Step, Task
from stepladder.workbench import prepare as setup


def test_a_deadline_among_the_environments_options_names_the_right_key(tmp_path: Path) -> None:
    recipe = digit_recipe(tmp_path, "run", "environment.options.deadline=9")
    with pytest.raises(ConfigError, match=r"environment\.options\.deadline=9 .* rollout\.deadline = 9"):
        setup.prepare(recipe)


def test_layers_are_recomputed_where_the_recipe_says_so(tmp_path: Path) -> None:
    for asked, wanted in (("true", True), ("false", False)):
        recipe = digit_recipe(tmp_path, "run", f"model.recompute_layers={asked}")
        policy = setup.prepare(recipe).policy
        assert ("forward" in vars(policy.lm.model.layers[0])) is wanted
        assert policy.recompute_layers() is not wanted  # what is on already is not turned on again


@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_a_run_records_the_device_and_type_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Resumed elsewhere, or after the machine changed, "auto" would choose anew."""
    recipe = digit_recipe(
        tmp_path, "run", "rl=null", "sft.epochs=1", "evaluation.raw=0", f"model.dtype={asked}"
    )
    path = ladder.train(recipe, display=Display(quiet=True))
    text = (path / "recipe.toml").read_text()
    model = tomllib.loads(text)["model"]
    assert (model["device"], model["dtype"]) == ("cpu", "float32")  # the tiny model's auto is float32
    assert '"auto"' not in text.partition("[engine]")[0]


def test_what_was_measured_is_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretrained model's auto is what the hardware has."""
    monkeypatch.setattr(setup, "pick_device", lambda device: "mps" if device == "auto" else device)
    monkeypatch.setattr(setup, "pick_dtype", lambda dtype, device: {"auto": torch.bfloat16}[dtype])
    section = setup.resolved(ModelSection())
    assert (section.device, section.dtype) == ("mps", "bfloat16")


def test_a_resumed_run_takes_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = digit_recipe(tmp_path, "run", "rl=null", "sft.epochs=1", "evaluation.raw=0", "model.dtype=auto")
    path = ladder.train(recipe, display=Display(quiet=True))
    asked = []
    monkeypatch.setattr(setup, "pick_dtype", lambda dtype, device: asked.append(dtype) or torch.float32)
    ladder.resume(path, display=Display(quiet=True))
    assert set(asked) == {"float32"}


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cuda", None, ":4096:8"), ("cuda:1", None, ":4096:8"), ("cuda", ":16:8", ":16:8"), ("cpu", None, None)],
)
def test_exact_mode_on_cuda_gives_cublas_the_workspace_it_needs(
    monkeypatch: pytest.MonkeyPatch, device: str, before: str | None, after: str | None
) -> None:
    """Without it the first matrix product raises in exact mode; a choice of the user's own stays."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before or "")  # what follows is undone after the test
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_before = []
    monkeypatch.setattr(
        torch,
        "use_deterministic_algorithms",
        lambda on: set_before.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")),
    )
    setup.be_deterministic(device)
    assert set_before == [after]


def test_exact_mode_is_set_for_the_device_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(setup, "pick_device", lambda device: {"auto": "cuda"}.get(device, device))
    monkeypatch.setattr(setup, "be_deterministic", asked.append)
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("done"))
    for name, overrides in {"exact": [], "loose": ["run.exact=false"]}.items():
        with pytest.raises(pytest.fail.Exception, match="done"):
            setup.prepare(digit_recipe(tmp_path, name, *overrides))
    assert asked == ["cuda"]


@pytest.mark.parametrize("overrides", [("evaluation.few_shot=2", "sft=null"), ("sft.demonstrations=4",)])
def test_demonstrations_of_a_world_that_makes_none_are_refused_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    for name in ("Plain", "Episode"):
        world = f"environment.name={__file__}:{name}"
        with pytest.raises(ConfigError, match=r"has no demonstrations\(count, seed\) method; add one"):
            ladder.train(digit_recipe(tmp_path, "run", world, *overrides), display=Display(quiet=True))
        assert not (tmp_path / "run").exists()


class Plain:
    """A newcomer's class that makes no demonstrations."""

    tasks = staticmethod(lambda split: ["?"] * 20)

    def reward(self, answer: str) -> float:
        return float(answer == "4")


class Episode:
    """An environment class that makes none."""

    tasks = staticmethod(lambda split: ["?"] * 20)

    def reset(self, task: Task, *, seed: int) -> Reset:
        return Reset(task.messages)

    def step(self, message: Message) -> Step:
        return Step(reward=1.0, terminated=True)


class Demonstrating(Plain):
    """... and one that does."""

    @staticmethod
    def demonstrations(count: int, seed: int) -> list[list[dict[str, str]]]:
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]
        return [talk for _ in range(count)]


def test_a_newcomers_class_climbs_every_rung_on_its_own_demonstrations(tmp_path: Path) -> None:
    """It has one conversation, of which nothing can be held out: refused until validation is 0."""
    world = f"environment.name={__file__}:Demonstrating"
    small = (world, "evaluation.few_shot=1", "rl.steps=1", "evaluation.raw=4", "evaluation.tasks=4")
    with pytest.raises(ConfigError, match=r"holds nothing out: the 48 demonstrations .* are 1 different"):
        ladder.train(digit_recipe(tmp_path, "run", *small), display=Display(quiet=True))
    whole = digit_recipe(tmp_path, "run", *small, "sft.validation=0")
    path = ladder.train(whole, display=Display(quiet=True))
    assert [e["rung"] for e in lines(path / "evaluations.jsonl")] == ["raw", "few-shot", "sft", "rl"]
    assert lines(path / "evaluations.jsonl")[2]["success"] == 1.0


@pytest.mark.parametrize(
    ("recipe", "environment", "words"),
    [
        ("hidden_digit", None, r"load_recipe\('hidden_digit'\)"),
        ({"rl": {}}, object(), "is no class"),
        ({"rl": {}}, "file.py:Shop", "is no class"),
        (load_recipe("hidden_digit"), Path, "would be ignored"),
    ],
)
def test_wrong_arguments_of_train_are_refused(recipe: Any, environment: Any, words: str) -> None:
    checked = inspect.unwrap(ladder.train)  # as users have it, without the type checks of the tests
    with pytest.raises(ConfigError, match=words):
        checked(recipe, environment=environment)


def test_an_adapter_is_made_without_warnings_of_other_libraries(tmp_path: Path) -> None:
    recipe = digit_recipe(tmp_path, "run", "model.lora={rank = 2, alpha = 4}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        setup._with_lora(setup.build_policy(recipe), recipe)
    assert [str(w.message) for w in said] == []
