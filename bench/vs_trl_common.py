"""What both workers of vs_trl.py share; it imports neither library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, list[int]]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("task", "mode", "model"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("steps", "batch", "threads", "budget"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kto_rows(rows: Sequence[Row], batch: int) -> list[dict[str, Any]]:
    """Chosen and rejected answers in turn, one of each prompt, and for the estimate of the KL the answer of
    the row before in the batch, around its end."""
    judged = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if i % 2 == 0 else "rejected"],
            "label": i % 2 == 0,
        }
        for i, row in enumerate(rows)
    ]
    for start in range(0, len(judged), batch):
        part = judged[start : start + batch]
        for i, row in enumerate(part):
            row["mismatched"] = part[i - 1]["completion"]
    return judged


def data_tokens(task: str, rows: Sequence[Row]) -> int:
    """Tokens a plain trainer computes for the data itself: prompts of pairs count twice."""
    if task in ("dpo", "reward"):
        return sum(2 * len(r["prompt"]) + len(r["chosen"]) + len(r["rejected"]) for r in rows)
    if task == "kto":
        return sum(len(r["prompt"]) + len(r["completion"]) for r in kto_rows(rows, len(rows)))
    return sum(len(r["prompt"]) + len(r["chosen"]) for r in rows)


def report(
    args: argparse.Namespace,
    rows: Sequence[Row],
    losses: Sequence[float],
    seconds: float,
    peak_mb: float,
    state_mb: float,
    **more: float,
) -> None:
    """`peak_mb`: above what the imports took; `state_mb`: weights (all copies), gradients, moments."""
    result = {
        "losses": list(losses),
        "tokens_per_second": data_tokens(args.task, rows) / seconds,
        "peak_mb": peak_mb,
        "state_mb": state_mb,
        "activation_mb": peak_mb - state_mb,
        **more,
    }
    args.out.write_text(json.dumps(result), encoding="utf-8")
