"""What a recipe becomes before anything is trained: its world, its settings, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from spine import digit_recipe

from stepladder.config import ModelSection
from stepladder.errors import ConfigError
from stepladder.training import ladder, setup
from stepladder.training.progress import Display


def test_a_deadline_among_the_environments_options_names_the_right_key(tmp_path: Path) -> None:
    recipe = digit_recipe(tmp_path, "run", "environment.options.deadline=9")
    with pytest.raises(ConfigError, match=r"environment\.options\.deadline=9 .* rollout\.deadline = 9"):
        setup.prepare(recipe)


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
    assert '"auto"' not in text


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
