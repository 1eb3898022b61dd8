"""What a run's reward models are worth on held-out data, with their calibration, as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepladder.recipe.config import rung_sections
from stepladder.reports.tables import number, percent


def scoring_texts(run: Path) -> list[str]:
    """A block for each reward model in the run folder; none where it has not been trained or validated."""
    blocks = []
    for folder in (name for name, section in rung_sections().items() if not section.trains_policy):
        title = folder.replace("_", " ").capitalize()
        file = run / folder / "reward_model.json"
        info: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if info.get("held_out"):
            blocks.append(_block(title, info["held_out"], info.get("reliability", ())))
    return blocks


def _block(title: str, held_out: dict[str, float], reliability: Any) -> str:
    found = {key.removeprefix("validation_"): value for key, value in held_out.items()}
    shares = [f"accuracy {percent(found['accuracy'])}", f"calibration error {number(found['ece'])}"]
    shares += [
        f"of {k} steps {percent(found[f'accuracy_{k}'])}"
        for k in ("right", "wrong")
        if f"accuracy_{k}" in found
    ]
    if "margin" in found:
        shares.append(f"mean margin {number(found['margin'])}")
    lines = [f"{title}, held out: {', '.join(shares)}"]
    lines += ["  it says   is right      n"]
    lines += [f"  {percent(says):>8} {percent(is_right):>10} {n:>6}" for says, is_right, n in reliability]
    return "\n".join(lines)
