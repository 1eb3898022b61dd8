"""The main job over several seeds, with its control arm, as one table.

    python bench/demo.py --out runs/proof --seeds 0 1 2

For each seed: the calculator recipe; then a control that spends as many minutes on more SFT with the same
demonstrations as the recipe's SFT and RL took together (with --threads 1, on one core, twice as many). Writes
OUT/demo.md. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNGS = ("raw", "few-shot", "sft", "more-sft", "rl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=0, help="of the control; 0: all cores")
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as rl.steps=20")
    args = parser.parse_args()
    rows: list[tuple[int, dict[str, Any], float]] = []
    for seed in args.seeds:
        name = f"seed{seed}"
        run("calculator", args.out, name, seed, args.overrides)
        minutes = training_minutes(args.out / name)
        control = [
            "rl=null",
            "sft.epochs=1000",
            "sft.patience=1000",
            "sft.min_improvement=0.0",
            f"sft.max_minutes={minutes * (2 if args.threads == 1 else 1):.2f}",
            f"run.threads={args.threads}",
            "evaluation.raw=0",
            "evaluation.few_shot=0",
        ]
        run("calculator", args.out, f"{name}-more-sft", seed, [*args.overrides, *control])
        control_results = evaluations(args.out / f"{name}-more-sft")
        results = {**control_results, **evaluations(args.out / name)}  # raw rows may be of either run
        results["more-sft"] = control_results["sft"]
        rows.append((seed, results, minutes))
        text = table(rows)
        (args.out / "demo.md").write_text(text, encoding="utf-8")
        print(text, flush=True)


def run(recipe: str, out: Path, name: str, seed: int, overrides: list[str]) -> None:
    if (out / name / "final").is_dir():
        return
    command = [sys.executable, "-m", "stepladder.cli", "train", recipe, f"run.out={out}", f"run.name={name}"]
    subprocess.run([*command, f"run.seed={seed}", *overrides, "--overwrite"], check=True)


def training_minutes(path: Path) -> float:
    """Minutes of the recipe's SFT and RL, without evaluations."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(line.get("seconds", 0.0) for line in lines) / 60


def evaluations(path: Path) -> dict[str, Any]:
    lines = (path / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["rung"]: line for line in map(json.loads, lines)}


def table(rows: list[tuple[int, dict[str, Any], float]]) -> str:
    """Held-out success in percent with its 95 % interval, by seed and by family."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    out = [
        "# The calculator job over seeds",
        "",
        f"Commit {commit}, {platform.system()} {platform.machine()}, Python {platform.python_version()}. "
        "Greedy decoding on held-out tasks; 95 % Wilson intervals. `more-sft` spends the minutes of the "
        "recipe's SFT and RL together on SFT with the same demonstrations (on one core: twice the minutes).",
        "",
        "| seed | " + " | ".join(RUNGS) + " | minutes of training |",
        "|---|" + "---|" * (len(RUNGS) + 1),
    ]
    for seed, results, minutes in rows:
        cells = [cell(results[r]) if r in results else "" for r in RUNGS]
        out.append(f"| {seed} | " + " | ".join(cells) + f" | {minutes:.1f} |")
    seed, results, _ = rows[0]
    out += ["", f"By family, seed {seed}, in percent:", "", "| family | " + " | ".join(RUNGS) + " |"]
    out.append("|---|" + "---|" * len(RUNGS))
    for family in results["rl"]["by_domain"]:
        shown = [results[r]["by_domain"].get(family, {}).get("success") for r in RUNGS]
        out.append(f"| {family} | " + " | ".join("" if v is None else f"{100 * v:.0f}" for v in shown) + " |")
    return "\n".join(out) + "\n"


def cell(line: dict[str, Any]) -> str:
    low, high = line["interval"]
    return f"{100 * line['success']:.1f} ({100 * low:.0f}-{100 * high:.0f}, n={line['n']})"


if __name__ == "__main__":
    main()
