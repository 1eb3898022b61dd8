"""A run as a process that can be killed, and what a resume will find."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spine import digit_recipe

from stepladder.policies.checkpoint import CheckpointStore
from stepladder.run.toml import to_toml


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


@dataclass(frozen=True)
class Quiet:
    """A run that nobody disturbed. Seconds until its first line on the screen, and from there to its end."""

    folder: Path
    starting: float
    work: float


def play_quietly(folder: Path, settings: tuple[str, ...]) -> Quiet:
    """The run `folder`/quiet, from beginning to end."""
    began = time.monotonic()
    child = start("train", recipe_file(folder, "quiet", settings))
    assert child.stdout is not None
    child.stdout.readline()
    first = time.monotonic()
    finish(child)
    return Quiet(folder / "quiet", first - began, time.monotonic() - first)


def finish(child: subprocess.Popen[str]) -> None:
    """Wait for the end of a process, which must be a good one."""
    _, err = child.communicate(timeout=900)
    assert child.returncode == 0, err


def kill_at_random(
    quiet: Quiet,
    settings: tuple[str, ...],
    kills: int,
    *,
    share: float,
    left: Callable[[Path], str],
    finished: Callable[[Path], str],
) -> tuple[Path, list[str]]:
    """Kill -9 a run beside the quiet one `kills` times, resuming it each time, and let it end.

    One kill in five falls anywhere in the start of the process, the others within `share` of the work after
    its first line. `left` says what a kill left, `finished` what a run is that got to its end; the kills
    left then hit another one. Returns the last run and the lines of a report.
    """
    rng, report, done = random.Random(0), [], 0
    killed = quiet.folder.with_name("killed")
    file = recipe_file(killed.parent, killed.name, settings)

    def child_process() -> subprocess.Popen[str]:
        exists = (killed / "recipe.toml").is_file()
        return start("resume", str(killed)) if exists else start("train", file)

    while done < kills:
        child = child_process()
        assert child.stdout is not None
        if done % 5 == 0:
            delay, since = rng.uniform(0, quiet.starting), "the start of the process"
        else:
            child.stdout.readline()
            delay, since = rng.uniform(0, share * quiet.work), "its first line"
        try:
            child.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            done += 1
            child.communicate()
            report.append(f"kill {done:2}: {delay:4.1f} s after {since}; resumes from {left(killed)}")
        else:
            finish(child)
            report.append(f"the run was finished{finished(killed)}; another one for the kills left")
            killed = killed.with_name(f"killed-{done}")
            file = recipe_file(killed.parent, killed.name, settings)
    finish(child_process())
    return killed, report
