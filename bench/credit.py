"""Credit, bonuses and domains, each against the plain form, on worlds where the difference decides.

    python bench/credit.py --out runs/credit --seeds 0 1 2

turns    eight turns, the first decides, the others pay by luck: credit by turns against the outcome
farming  +.10 for every call: without a cap the calls are farmed, with one they are not
domains  two worlds paying 10 and .1: without normalisation the small one stays where it was

Interrupted runs are resumed, finished ones only read. Writes bench/results/credit.md and credit_*.svg.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from curves import curves, mean_curve, smooth, write
from runs import curve, reached, run

WORLDS = Path(__file__).parent / "worlds.py"
BAR = 0.95

BASE: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "dtype": "float32",
        "options": {"symbols": list("?SAB01234"), "hidden": 64, "layers": 2, "intermediate": 128},
    },
    "rollout": {"max_turns": 8, "max_tokens": 3, "max_context": 96},
    "sft": {"demonstrations": 128, "epochs": 4, "batch_size": 32, "learning_rate": 2e-3, "validation": 0},
    "rl": {
        "algorithm": "dr_grpo",
        "kl": {"coefficient": 0.0},
        "tasks_per_step": 8,
        "group_size": 8,
        "learning_rate": 5e-4,
        "steps": 150,
    },
    "evaluation": {"raw": 0, "tasks": 50},
    "run": {"checkpoint_every": 50},
}
CREDIT = {
    "outcome": ("rl.credit.kind=outcome",),
    "turns": ("rl.credit.kind=turns",),
    "turns, discount .5": ("rl.credit.kind=turns", "rl.credit.turn_gamma=0.5"),
}
BONUS = {"no bonus": None, "no cap": {}, "cap .10": {"cap": 0.1}}
NORMALISE = ("none", "task")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/credit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=["turns", "farming", "domains"])
    parser.add_argument("--set", nargs="*", default=[], help="overrides for all, to try things out")
    args = parser.parse_args()
    parts = {"turns": turns, "farming": farming, "domains": domains}
    pages = [parts[name](args.out, args.seeds, args.set) for name in args.only]
    write("credit.md", HEAD + "\n".join(pages))


def play(out: str, name: str, seed: int, environment: dict[str, Any], settings: list[str], **rl: Any) -> Any:
    recipe = {**BASE, "environment": environment, "rl": {**BASE["rl"], **rl}}
    return run(out, f"{name}-{seed}", recipe, [f"run.seed={seed}", *settings])


def turns(out: str, seeds: list[int], more: list[str]) -> str:
    rows, lines = [], {}
    for name, settings in CREDIT.items():
        world = {"name": f"{WORLDS}:Decisive"}
        folder = "turns-" + name.replace(", discount .", "")
        found = [
            curve(
                play(out, folder, s, world, [*settings, f"rl.stop_at_success={BAR}", *more], steps=300),
                "success",
            )
            for s in seeds
        ]
        lines[name] = mean_curve([smooth(line) for line in found])
        at = [reached(smooth(line), BAR) for line in found]
        rows.append(f"| {name} | {_times(at)} | {_mean(at)} |")
        print(rows[-1], flush=True)
    picture = curves(
        lines, title="a decisive first turn of eight", x="episodes", y="success", levels=[BAR], top=1.0
    )
    write("credit_turns.svg", picture)
    return TURNS + "\n".join(rows) + "\n"


def farming(out: str, seeds: list[int], more: list[str]) -> str:
    rows, calls = [], {}
    for name, extra in BONUS.items():
        bonus = {"kind": "tool", "per": "call", "weight": 0.1, "pattern": "^S$"}
        given = {} if extra is None else {"bonuses": [{**bonus, **extra}]}
        folder = "farming-" + name.replace(" ", "").replace(".", "")
        world = {"name": f"{WORLDS}:Farm"}
        found = [
            play(out, folder, s, world, more, credit={"kind": "turns"}, steps=200, **given) for s in seeds
        ]
        # every turn but an answer is a call
        calls[name] = mean_curve([smooth(curve(lines, "turns")) for lines in found])
        ends = [[statistics.fmean(line[key] for line in lines[-10:]) for lines in found] for key in SHOWN]
        cells = [", ".join(f"{value:.2f}" for value in values) for values in ends]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    picture = curves(calls, title="+.10 for every call", x="episodes", y="turns an episode", top=8.0)
    write("credit_farming.svg", picture)
    return FARMING + "\n".join(rows) + "\n"


SHOWN = ("turns", "success", "reward")


def domains(out: str, seeds: list[int], more: list[str]) -> str:
    rows, lines = [], {}
    worlds = [
        {"name": f"{WORLDS}:Scaled", "label": label, "options": {"question": q, "answer": a, "worth": worth}}
        for label, q, a, worth in (("large", "A", "1", 10), ("small", "B", "2", 0.1))
    ]
    world = {"name": "mixed", "options": {"worlds": worlds}}
    for normalise in NORMALISE:
        found = [
            play(out, f"domains-{normalise}", s, world, more, credit={"normalise": normalise}, steps=60)
            for s in seeds
        ]
        for label in ("large", "small"):
            of = [smooth(curve(lines_of, f"success/{label}")) for lines_of in found]
            lines[f"{label}, normalise = {normalise}"] = mean_curve(of)
            first = ", ".join(f"{line[0][1]:.2f}" for line in of)
            last = ", ".join(f"{line[-1][1]:.2f}" for line in of)
            rows.append(f"| {normalise} | {label} | {first} | {last} |")
            print(rows[-1], flush=True)
    picture = curves(lines, title="two worlds, paying 10 and .1", x="episodes", y="success", top=1.0)
    write("credit_domains.svg", picture)
    return DOMAINS + "\n".join(rows) + "\n"


def _times(at: list[float | None]) -> str:
    return ", ".join("not reached" if x is None else f"{x:.0f}" for x in at)


def _mean(at: list[float | None]) -> str:
    known = [x for x in at if x is not None]
    return f"{statistics.fmean(known):.0f}" if len(known) == len(at) else "-"


HEAD = """\
# Credit, bonuses, domains

Made by `python bench/credit.py` with a tiny transformer that was warmed up on random answers.

"""
TURNS = """\
## A decisive first turn

Eight turns; the first is worth 1 or 0, the other seven pay between -1 and 1 by luck. Episodes until the
success of training, the mean of five steps, is .95.

| credit | episodes, by seed | mean |
|---|---|---|
"""
FARMING = """\
## Farming a bonus

Asking shows the digit, the right answer is worth 1: one call is enough. Means of the last ten steps, by
seed; the reward has the bonus in it.

| bonus a call | turns | success | reward |
|---|---|---|---|
"""
DOMAINS = """\
## Two domains

Success of each world in the first and the last steps, by seed.

| normalise | world | first | last |
|---|---|---|---|
"""

if __name__ == "__main__":
    main()
