"""What staleness buys and costs: one loop, max_staleness 0 (synchronous) to 4, on episodes of 10 ms to 3 s.

    python bench/asynchronous.py --out runs/async

Writes bench/results/asynchronous.md: trained tokens per second of RL, final reward, the largest staleness
seen, and how far each task's share in training is from its share in the data. Then, with --corrections, the
reward curves of an uncorrected and of corrected losses at a high staleness. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from curves import curves, mean_curve, smooth

from stepladder.ladder import train
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display

TASKS, STEPS, PER_STEP, GROUP = 64, 100, 32, 8  # 50 epochs of the tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/async"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--corrections", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    rows = [
        measure(
            run(args.out, f"s{s}-{seed}", [f"rl.off_policy.max_staleness={s}", f"run.seed={seed}"]), s, seed
        )
        for seed in args.seeds
        for s in args.staleness
    ]
    text = heading() + table(rows)
    args.results.mkdir(parents=True, exist_ok=True)
    if args.corrections:
        text += corrections(args.out, args.seeds, args.results)
    (args.results / "asynchronous.md").write_text(text, encoding="utf-8")
    print(text)


def run(out: Path, name: str, overrides: list[str], world: str = "bench/long_tail.py:LongTail") -> Path:
    folder = out / name
    if (folder / "final").is_dir():
        return folder
    recipe = load_recipe(
        "hidden_digit",
        [
            f"run.out={out}",
            f"run.name={name}",
            "run.exact=false",
            "run.checkpoint_every=1000",
            f"environment.name={world}",
            f"environment.options={{ train = {TASKS} }}",
            f"rl.steps={STEPS}",
            f"rl.tasks_per_step={PER_STEP}",
            f"rl.group_size={GROUP}",
            "rl.learning_rate=2e-4",  # as bench/algorithms.py, where every seed learns
            "rl.updates_per_batch=4",
            "rl.stop_at_success=null",
            "evaluation.raw=0",
            "evaluation.tasks=200",
            *overrides,
        ],
    )
    return train(recipe, overwrite=True, display=Display(quiet=True))


def measure(folder: Path, staleness: int, seed: int) -> dict[str, Any]:
    steps = [m for m in lines(folder / "metrics.jsonl") if m["phase"] == "rl"]
    counts = Counter(t["task"]["id"] for t in lines(folder / "trajectories" / "rl.jsonl"))
    total = sum(counts.values())
    return {
        "staleness": staleness,
        "seed": seed,
        "seconds": sum(m["seconds"] for m in steps),
        "tokens": sum(m["trained_tokens"] for m in steps),
        "reward": fmean(m["reward"] for m in steps[-5:]),
        "held out": lines(folder / "evaluations.jsonl")[-1]["success"],
        "lag": max(m.get("version_lag_max", 0.0) for m in steps),
        "mean lag": fmean(m.get("version_lag", 0.0) for m in steps),
        "share": max(abs(counts[task] / total - 1 / TASKS) for task in counts)
        if len(counts) == TASKS
        else 1.0,
    }


def table(rows: list[dict[str, Any]]) -> str:
    out = [
        "| max_staleness | seed | seconds of RL | trained tokens/s | against synchronous | reward, last 5 "
        "steps | held-out success | staleness seen, mean / largest | largest difference of a task's share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed = row["tokens"] / row["seconds"]
        base = next((r for r in rows if r["staleness"] == 0 and r["seed"] == row["seed"]), None)
        ratio = f"{speed / (base['tokens'] / base['seconds']):.2f}" if base else ""
        out.append(
            f"| {row['staleness']} | {row['seed']} | {row['seconds']:.0f} | {speed:.0f} | {ratio} | "
            f"{row['reward']:.3f} | {row['held out']:.3f} | {row['mean lag']:.2f} / {row['lag']:.0f} | "
            f"{100 * row['share']:.2f} % |"
        )
    return "\n".join(out) + "\n"


def corrections(out: Path, seeds: list[int], results: Path) -> str:
    """Four updates a batch on tokens up to 8 steps old: what each correction makes of it."""
    kinds = ("behaviour", "none", "token_cap", "token_mask")
    drawn: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in kinds}
    rows = ["", "## High staleness: max_staleness 8", ""]
    rows += ["| correction | " + " | ".join(f"seed {s}" for s in seeds) + " |", "|---|" + "---|" * len(seeds)]
    for kind in kinds:
        cells = []
        for seed in seeds:
            extra = [f"run.seed={seed}", "rl.off_policy.max_staleness=8"]
            folder = run(
                out,
                f"correction-{kind}-{seed}",
                [
                    *extra,
                    f"rl.off_policy.correction={kind}",
                    "environment.options={ train = 64, slow = 0.2 }",
                ],
            )
            steps = [m for m in lines(folder / "metrics.jsonl") if m["phase"] == "rl"]
            held = lines(folder / "evaluations.jsonl")[-1]["success"]
            half = len(steps) // 2
            drawn[kind].append(smooth([(float(m["step"]), m["success"]) for m in steps]))
            cells.append(f"reward {fmean(m['reward'] for m in steps[half:]):.3f}, held out {held:.3f}")
        rows.append(f"| {kind} | " + " | ".join(cells) + " |")
    picture = curves(
        {kind: mean_curve(lines) for kind, lines in drawn.items()},
        title="success of training at max_staleness 8, by correction (mean of the seeds)",
        x="steps",
        y="success (moving mean of 5 steps)",
        top=1.0,
    )
    (results / "asynchronous.svg").write_text(picture, encoding="utf-8")
    return "\n".join(rows) + "\n\nReward is the mean of the second half of the steps.\n"


def heading() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return (
        "# Staleness: what it buys and what it costs\n\n"
        f"Commit {commit}, {platform.system()} {platform.machine()}, Python {platform.python_version()}. The "
        f"hidden digit, a transformer from scratch; {TASKS} tasks whose episodes last from 10 ms to 3 s "
        f"(log-uniform), {STEPS} steps of {PER_STEP} groups of {GROUP}. Ratios within one seed; times are of "
        "this machine.\n\n"
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
