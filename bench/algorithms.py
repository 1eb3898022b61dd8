"""Do all nine algorithms learn the hidden digit, how many episodes do they take, and do their clips clip?

    python bench/algorithms.py --out runs/algorithms --seeds 0 1 2

A transformer from scratch, warmed up on random actions. Four updates on each batch, so that ratios move and
clips act. Interrupted runs are resumed, finished ones only read. Writes bench/results/algorithms.md and .svg.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from curves import curves, mean_curve, smooth, write
from runs import curve, held_out, reached, run

BAR = 0.95
COMMON = (
    "rl.kl_coefficient=0.0",
    "rl.updates_per_batch=4",
    "rl.tasks_per_step=16",
    "rl.group_size=8",
    "rl.steps=400",
    "rl.stop_at_success=0.97",
    "rl.aggregation=null",
    "evaluation.raw=0",
    "run.checkpoint_every=50",
)
# What is set besides an algorithm's own row: the learning rate its gradient's scale wants, and PPO's critic.
SETTINGS: dict[str, tuple[str, ...]] = {
    "reinforce": ("rl.learning_rate=3e-4",),
    "rloo": ("rl.learning_rate=4e-4",),
    "reinforce++": ("rl.learning_rate=4e-4",),
    "ppo": (
        "rl.learning_rate=4e-4",
        "rl.critic.learning_rate=2e-3",
        "rl.critic.value_clip=0.0",
        "rl.critic.lam=1.0",
    ),
    "grpo": ("rl.learning_rate=4e-4",),
    "dr_grpo": ("rl.learning_rate=4e-4",),
    "dapo": ("rl.learning_rate=4e-4",),
    "gspo": ("rl.learning_rate=4e-4",),
    "cispo": ("rl.learning_rate=4e-4",),
}
CLIPS = ("rloo", "reinforce++", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/algorithms")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--set", nargs="*", default=[], help="overrides for all, to try things out")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in args.seeds:  # seed by seed, so that a first table is there early
        for name in args.only:
            found.setdefault(name, []).append(measure(args.out, name, seed, args.set))
            row = found[name][-1]
            print(
                f"{name} seed {seed}: {row['episodes']} episodes, held out {row['held_out']:.3f}", flush=True
            )
        report(found)


def measure(out: str, name: str, seed: int, more: list[str]) -> dict[str, Any]:
    """One run: when it reached the bar, how it ended, how much was clipped on the way there."""
    folder = f"{name.replace('+', 'p')}-{seed}"
    settings = [f"rl.algorithm={name}", f"run.seed={seed}", *COMMON, *SETTINGS[name], *more]
    lines = run(out, folder, "hidden_digit", settings)
    success = curve(lines, "success")
    moved = [line for line in lines if line["updated"]]
    clipped = [line["clip_low"] + line["clip_high"] for line in moved]
    return {
        "success": success,
        "episodes": reached(smooth(success), BAR),
        "held_out": held_out(out, folder),
        "clip": statistics.fmean(clipped),
        "clip_max": max(clipped),
        "minutes": sum(line["seconds"] for line in lines) / 60,
    }


def report(found: dict[str, list[dict[str, Any]]]) -> None:
    """The table and the picture of what has been measured so far."""
    grpo = found.get("grpo", [])
    against = [row["episodes"] for row in grpo if row["episodes"] is not None]
    base = statistics.fmean(against) if against else None
    rows = []
    for name, runs in found.items():
        times = [row["episodes"] for row in runs if row["episodes"] is not None]
        mean = statistics.fmean(times) if times else None
        cells = [
            f"`{name}`",
            f"{len(times)} of {len(runs)}",
            ", ".join("-" if row["episodes"] is None else f"{row['episodes']:.0f}" for row in runs),
            "-" if mean is None or base is None else f"{mean / base:.2f}",
            ", ".join(f"{row['held_out']:.3f}" for row in runs),
            f"{statistics.fmean(row['clip'] for row in runs):.4f}" if name in CLIPS else "no clip",
            f"{max(row['clip_max'] for row in runs):.3f}" if name in CLIPS else "",
            f"{statistics.fmean(row['minutes'] for row in runs):.1f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    write("algorithms.md", HEAD + "\n".join(rows) + "\n")
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


HEAD = """\
# Nine algorithms on the hidden digit

A tiny transformer from scratch; batches of 16 groups of 8, four updates on each batch, no KL term; every
other column is the algorithm's own row of `stepladder/algorithms.py`. Made by `python bench/algorithms.py`.

The bar is a training success of .95, the mean of five steps. Clip: share of trained tokens whose gradient the
clip removes in the last of the four updates, mean over the run, and the largest of one step.

| algorithm | seeds at the bar | episodes until there | of GRPO's | held out | clip | clip, max | minutes |
|---|---|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
