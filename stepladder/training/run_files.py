"""The names that a run writes into its folder. Whatever else lies there is the user's, and stays."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from stepladder.reports.run import ALARMS, DATA, EVALUATIONS, METRICS, RECIPE
from stepladder.training.rows import ACCEPTED, PAIRS

LOCK = ".lock"
ENVIRONMENT = "environment.json"
SAMPLING = "rejection_sampling"  # the only rung that writes rows of data


def log_names(sections: Collection[str]) -> tuple[str, ...]:
    """The logs of a run whose recipe has these sections, each with its path in the folder.

    >>> log_names(["model", "rl"])[-1]
    'trajectories/rl.jsonl'
    """
    phases = sorted(sections)
    top = [METRICS, EVALUATIONS, ALARMS]
    if SAMPLING in sections:
        top += [ACCEPTED, PAIRS]
        phases += [Path(ACCEPTED).stem, Path(PAIRS).stem]
    return (*top, *(f"trajectories/{phase}.jsonl" for phase in phases))


_WRITTEN = frozenset(
    {
        *(RECIPE, ENVIRONMENT, DATA, LOCK, "plan.json", "report.html", "summary.txt"),
        *(METRICS, EVALUATIONS, ALARMS, ACCEPTED, PAIRS, "steps.jsonl"),
        *("trajectories", "checkpoints", "final", "reward_model", "process_reward_model"),
        *("rejection_sampling_start.safetensors", "reference_logprobs.safetensors", "reference.safetensors"),
        *("tensorboard", "wandb"),
    }
)
_PATTERNS = re.compile(
    r"reference-\d+\.safetensors"
    r"|stepladder-weights-.*"  # of a vLLM server whose folder this is
    r"|\..+\.new|\.(tmp|old)-.+-\d+-\d+"  # files and folders that a killed process was writing
)


_INSIDE = {  # of folders whose content is known; an export is a whole and is replaced as one
    "checkpoints": re.compile(r"step-\d{8,}|\.(tmp|old)-.+-\d+-\d+"),
    "trajectories": re.compile(r"[a-z_]+\.jsonl"),
}


def strange_names(folder: Path) -> list[str]:
    """What lies in a run folder, or in its checkpoints or trajectories, and no run writes; by path."""
    found = [child.name for child in folder.iterdir() if not is_written(child.name)]
    for name, usual in _INSIDE.items():
        if (folder / name).is_dir():
            found += [f"{name}/{c.name}" for c in (folder / name).iterdir() if not usual.fullmatch(c.name)]
    return sorted(found)


def is_written(name: str) -> bool:
    """Is this what a run puts at the top of its folder?

    >>> is_written("metrics.jsonl"), is_written("reference-40.safetensors"), is_written("thesis.tex")
    (True, True, False)
    """
    return name in _WRITTEN or _PATTERNS.fullmatch(name) is not None
