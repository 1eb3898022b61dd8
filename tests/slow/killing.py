"""A run as a process that can be killed, and what a resume will find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from spine import digit_recipe

from stepladder.policies.checkpoint import CheckpointStore
from stepladder.training.toml import to_toml


def start(*arguments: str) -> subprocess.Popen[str]:
    """`stepladder ARGUMENTS` as a child process, with its output in pipes."""
    command = [sys.executable, "-u", "-m", "stepladder.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def recipe_file(folder: Path, name: str, settings: tuple[str, ...]) -> str:
    """The recipe of a run `folder`/`name` on the hidden digit, with these settings, as a file."""
    recipe = digit_recipe(folder, name, *settings)
    file = folder / f"{name}.toml"
    file.write_text(to_toml(recipe.model_dump(mode="json", exclude_none=True)))
    return str(file)


def newest(run: Path) -> dict[str, Any] | None:
    """The state in the newest whole checkpoint of a run, if there is one."""
    store = CheckpointStore(run / "checkpoints")
    latest = store.latest() if (run / "recipe.toml").is_file() else None
    return None if latest is None else store.load_state(latest)


def where(run: Path) -> str:
    """What a resume will find, in words."""
    state = newest(run)
    if state is None:
        return "no checkpoint" if (run / "recipe.toml").is_file() else "no run yet"
    return f"{state['rung'] or 'between rungs'} step {state['state'].get('step', 0)}, done: {state['done']}"
