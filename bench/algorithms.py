"""Do all nine algorithms learn the hidden digit, how many episodes do they take, and do their clips clip?

    python bench/algorithms.py --out runs/algorithms --seeds 0 1 2

A transformer from scratch, warmed up on random actions. Four updates on each batch, so that ratios move and
clips act. Four updates move the policy further than one: the rate is half of the bundled recipe's, and the
batch as large as there. (With half the batch at 4e-4, some of the seeds become deterministic before they have
learned to copy the digit.) Interrupted runs are resumed, finished ones only read. A run that stops because no
group differs any more is a row like the others. Writes bench/results/algorithms.md and .svg.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from curves import curves, mean_curve, smooth, write
from runs import curve, held_out, reached, run, steps

from stepladder.errors import NothingToLearn
from stepladder.run.provenance import cpu_model, git_state

BAR = 0.95
COMMON = (
    "rl.kl.coefficient=0.0",
    "rl.updates_per_batch=4",
    "rl.tasks_per_step=32",
    "rl.group_size=8",
    "rl.learning_rate=2e-4",
    "rl.steps=250",
    "rl.stop_at_success=0.96",
    "rl.aggregation=null",
    "evaluation.raw=0",
    "run.checkpoint_every=50",
)
NAMES = ("reinforce", "rloo", "reinforce++", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
# What is set besides an algorithm's own row. GSPO's clip, of 3e-4, leaves little of a batch after its first
# update: at 2e-4 it took 2.1 times GRPO's episodes. DAPO's seed 2 came to the bar at 2e-4, and lost one of
# the digits again in its last batch.
SETTINGS = {
    "ppo": ("rl.critic.learning_rate=2e-3", "rl.critic.value_clip=0.0", "rl.critic.lam=1.0"),
    "gspo": ("rl.learning_rate=4e-4",),
    "dapo": ("rl.learning_rate=1.5e-4",),
}
CLIPS = NAMES[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/algorithms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--set", nargs="*", default=[], help="overrides for all, to try things out")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in args.seeds:  # seed by seed, so that a first table is there early
        for name in args.only:
            row = measure(args.out, name, seed, args.set)
            found.setdefault(name, []).append(row)
            print(f"{name} seed {seed}: {_count(row)} episodes, held out {_end(row)}", flush=True)
        report(found, args.seeds[: args.seeds.index(seed) + 1])


def measure(out: str, name: str, seed: int, more: list[str]) -> dict[str, Any]:
    """One run: when it reached the bar, how it ended, how much was clipped on the way there."""
    folder = f"{name.replace('+', 'p')}-{seed}"
    settings = [f"rl.algorithm={name}", f"run.seed={seed}", *COMMON, *SETTINGS.get(name, ()), *more]
    ended = None
    try:
        lines, ended = run(out, folder, "hidden_digit", settings), held_out(out, folder)
    except NothingToLearn:  # too deterministic to tell good from bad, and not all solved: no final evaluation
        lines = steps(out, folder)
    success = curve(lines, "success")
    moved = [line for line in lines if line["updated"]]
    clipped = [line["clip_low"] + line["clip_high"] for line in moved] or [0.0]
    return {
        "success": success,
        "episodes": reached(smooth(success), BAR),
        "held_out": ended,
        "clip": statistics.fmean(clipped),
        "clip_max": max(clipped),
        "minutes": sum(line["seconds"] for line in lines) / 60,
    }


def report(found: dict[str, list[dict[str, Any]]], seeds: list[int]) -> None:
    """The table and the picture of what has been measured so far."""
    base = _mean(found.get("grpo", []))
    rows = []
    for name, runs in found.items():
        mean = _mean(runs)
        cells = [
            f"`{name}`",
            f"{sum(row['episodes'] is not None for row in runs)} of {len(runs)}",
            ", ".join(map(_count, runs)),
            "-" if mean is None else f"{mean:.0f}",
            "-" if mean is None or base is None else f"{mean / base:.2f}",
            ", ".join(map(_end, runs)),
            f"{statistics.fmean(row['clip'] for row in runs):.4f}" if name in CLIPS else "no clip",
            f"{max(row['clip_max'] for row in runs):.3f}" if name in CLIPS else "",
            f"{statistics.fmean(row['minutes'] for row in runs):.1f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    write(
        "algorithms.md", HEAD.format(seeds=", ".join(map(str, seeds)), where=where()) + "\n".join(rows) + "\n"
    )
    lines = {name: mean_curve([smooth(row["success"]) for row in runs]) for name, runs in found.items()}
    picture = curves(
        lines,
        title="hidden digit: success while training, mean over seeds",
        x="episodes",
        y="success (moving mean of 5 steps)",
        levels=[BAR],
        top=1.0,
    )
    write("algorithms.svg", picture)


def where() -> str:
    """Commit and kind of machine."""
    git = git_state(Path(__file__).parent)
    commit = "unknown" if git is None else git["commit"][:7]
    return (
        f"Commit {commit}; {cpu_model()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, "
        f"{platform.system()}, torch {torch.__version__}"
    )


def _mean(runs: list[dict[str, Any]]) -> float | None:
    """Episodes until the bar, mean over the seeds; None where a seed never came there."""
    times = [row["episodes"] for row in runs]
    return None if not times or None in times else statistics.fmean(times)


def _count(row: dict[str, Any]) -> str:
    return "-" if row["episodes"] is None else f"{row['episodes']:.0f}"


def _end(row: dict[str, Any]) -> str:
    return "stopped" if row["held_out"] is None else f"{row['held_out']:.3f}"


HEAD = """\
# Nine algorithms on the hidden digit

A tiny transformer from scratch, warmed up on random actions; batches of 32 groups of 8, four updates on each
batch, learning rate 2e-4 (GSPO 4e-4, DAPO 1.5e-4), no KL term; every other column is the algorithm's own row
of `stepladder/algorithms.py`. Seeds {seeds}. Made by `python bench/algorithms.py`. {where}.

The bar is a training success of .95, the mean of five steps. "of GRPO's": mean of episodes over the seeds,
over GRPO's mean. "stopped": no group differed any more. Clip: share of trained tokens whose gradient the clip
removes in the last of the four updates, mean over the run, and the largest of one step.

![curves](algorithms.svg)

| algorithm | at the bar | episodes until there | mean | of GRPO's | held out | clip | clip, max | minutes |
|---|---|---|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
