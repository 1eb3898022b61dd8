"""The names that a run writes into its folder. Whatever else lies there is the user's, and stays."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from stepladder.recipe.config import Recipe, rung_sections
from stepladder.reports.run import ALARMS, DATA, EVALUATIONS, METRICS, RECIPE

LOCK = ".lock"
ENVIRONMENT = "environment.json"


def log_names(sections: Collection[str]) -> tuple[str, ...]:
    """The logs of a run whose recipe has these sections, each with its path in the folder.

    >>> log_names(["model", "rl"])[-1]
    'trajectories/rl.jsonl'
    """
    rows = [name for rung, section in rung_sections().items() if rung in sections for name in section.rows]
    phases = [*sorted(sections), *(Path(name).stem for name in rows)]
    return (METRICS, EVALUATIONS, ALARMS, *rows, *(f"trajectories/{phase}.jsonl" for phase in phases))


_WRITTEN = frozenset(
    {
        *(RECIPE, ENVIRONMENT, DATA, LOCK, "plan.json", "report.html", "summary.txt"),
        *(METRICS, EVALUATIONS, ALARMS, "trajectories", "checkpoints", "final"),
        *(name for section in rung_sections().values() for name in (*section.rows, *section.writes)),
        *(rung for rung, section in rung_sections().items() if not section.trains_policy),
        *("tensorboard", "wandb"),
    }
)
_ASIDE = r"\.(tmp|old)-.+-\d+-\d+"  # a folder that a killed process was writing
_PATTERNS = re.compile(
    r"reference-\d+\.safetensors"
    r"|stepladder-weights-.*"  # of a vLLM server whose folder this is
    rf"|\..+\.new|{_ASIDE}"
)
_CHECKPOINT = re.compile(rf"step-\d{{8,}}|{_ASIDE}")


def strange_names(folder: Path) -> list[str]:
    """What lies in a run folder, or in its checkpoints or trajectories, and no run writes; by path.

    An export is a whole, and is replaced as one.
    """
    logs = log_names(Recipe.model_fields)
    found = [path.name for path in folder.iterdir() if not is_written(path.name)]
    found += [
        f"checkpoints/{p.name}" for p in folder.glob("checkpoints/*") if not _CHECKPOINT.fullmatch(p.name)
    ]
    inside = [f"trajectories/{path.name}" for path in folder.glob("trajectories/*")]
    return sorted([*found, *(name for name in inside if name not in logs)])


def is_written(name: str) -> bool:
    """Is this what a run puts at the top of its folder?

    >>> is_written("metrics.jsonl"), is_written("reference-40.safetensors"), is_written("thesis.tex")
    (True, True, False)
    """
    return name in _WRITTEN or _PATTERNS.fullmatch(name) is not None
