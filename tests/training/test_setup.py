"""What a recipe becomes before anything is trained: its world, its settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from spine import digit_recipe

from stepladder.errors import ConfigError
from stepladder.training import setup


def test_a_deadline_among_the_environments_options_names_the_right_key(tmp_path: Path) -> None:
    recipe = digit_recipe(tmp_path, "run", "environment.options.deadline=9")
    with pytest.raises(ConfigError, match=r"environment\.options\.deadline=9 .* rollout\.deadline = 9"):
        setup.prepare(recipe)
