"""What RL unlearns on families it does not play, and what an SFT replay term holds of it.

    python bench/replay.py rl.steps=20 --start runs/calculator-sft/final     # writes bench/results/replay.md

From one warm-started model, GRPO on some of the calculator's families (by default those that need the tool),
with and without `rl.replay` of the 42 demonstrations of the warm start; two demonstrated families that are
answered without the tool are left out of RL. Greedy success on held-out problems of both kinds, before and
after. Finished runs and evaluations are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from runs import run

from stepladder.commands.evaluate import evaluate_model
from stepladder.environments.worlds.calculator import CalculatorWorld
from stepladder.environments.worlds.families import FAMILIES
from stepladder.evaluation.asked import Asked
from stepladder.recipe.config import load_recipe
from stepladder.reports.tables import sign_test, wilson_interval
from stepladder.run.training_files import chat

RESULTS = Path(__file__).parent / "results"
LEFT_OUT = ["house", "other_count"]  # demonstrated, answered without the tool
TOOL = [f.name for f in FAMILIES if f.name not in [*LEFT_OUT, "age"]]  # those that need the tool
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", required=True, help="a folder of a warm-started model")
    parser.add_argument("--out", type=Path, default=Path("runs/replay"))
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--each", type=int, default=40, help="held-out problems of a family left out")
    parser.add_argument("--played", nargs="+", default=TOOL, choices=[*TOOL, "age"], help="families of RL")
    parser.add_argument("--results", type=Path, default=RESULTS / "replay.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as rl.steps=10")
    args = parser.parse_args()
    shown = write_demonstrations(args.out / "demonstrations.jsonl")
    settings = [
        f"model.name={args.start}",
        f"environment.options.families={json.dumps(args.played)}",
        "evaluation.raw=0",
        "evaluation.few_shot=0",
        "evaluation.tasks=1",
        f"run.seed={SEED}",
        "rl.replay.batch=4",
        *args.overrides,
    ]
    asked = dict.fromkeys(LEFT_OUT, args.each) | {f: max(7, 56 // len(args.played)) for f in args.played}
    rows = [("before RL", evaluated(args.start, args.out, "start", asked))]
    for weight in args.weights:
        name = f"replay-{weight:g}"
        replayed = (
            f"sft={{data = {json.dumps(str(shown))}, epochs = 0, validation = 0}}" if weight else "sft=null"
        )
        run(args.out, name, "calculator", [*settings, replayed, f"rl.replay.weight={weight}"])
        label = f"RL, rl.replay.weight = {weight:g}" if weight else "RL alone"
        final = str(args.out / name / "final")
        rows.append((label, evaluated(final, args.out, name, asked)))
    text = table(rows, load_recipe("calculator", settings).rl, args.played)
    args.results.write_text(text, encoding="utf-8")
    print(text)


def write_demonstrations(path: Path) -> Path:
    """The conversations of the recipe's warm start, as rows of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    world = CalculatorWorld()
    tools = [tool.to_dict() for tool in world.tools]
    rows = [{"messages": chat(c), "tools": tools} for c in world.demonstrations(42, SEED)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.resolve()


def evaluated(model: str, out: Path, name: str, asked: dict[str, int]) -> dict[str, list[int]]:
    """Family -> 1 or 0 for each of `asked` held-out problems, in their order; "tool" -> used it, where left
    out."""
    path = out / f"{name}-evaluation.json"
    if path.is_file():
        found: dict[str, list[int]] = json.loads(path.read_text())
        return found
    found = {"tool": []}
    for families in (LEFT_OUT, [f for f in asked if f not in LEFT_OUT]):
        question = Asked(
            "calculator",
            [
                f"environment.options.families={json.dumps(families)}",
                "rollout.max_turns=3",
                "rollout.max_tokens=64",
                "rollout.max_context=640",
            ],
            tasks=sum(asked[f] for f in families),
            temperature=0.0,
            seed=SEED,
        )
        (played,) = evaluate_model(model, question)
        for t in played.result.trajectories:
            found.setdefault(t.task.domain, []).append(int(t.score.value >= 1.0))
            if families is LEFT_OUT:
                found["tool"].append(int(any(m.tool_calls for m in t.messages)))
    path.write_text(json.dumps(found))
    return found


def table(rows: list[tuple[str, dict[str, list[int]]]], rl: Any, families: list[str]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    more = f"Replay adds {rl.replay.batch} of the demonstrations to every update. "
    replayed = more if len(rows) > 2 else ""
    on = f"the {len(TOOL)} families that need the tool" if families == TOOL else _listed(families)
    out = [
        "# What RL unlearns elsewhere, and what replay holds",
        "",
        f"`bench/replay.py`, commit {commit}, {platform.system()} {platform.machine()}, one CPU thread, seed "
        f"{SEED}. SmolLM2-135M after SFT on 42 demonstrations; then {rl.steps} steps of GRPO with "
        f"{rl.tasks_per_step} tasks of {rl.group_size} episodes (learning rate {rl.learning_rate:g}) on "
        f"{on}. {_listed(LEFT_OUT)} were "
        f"demonstrated, are answered without the tool and are not played. {replayed}Greedy decoding, "
        "held-out problems, 95 % Wilson intervals, in percent.",
        "",
        "| | families played | "
        + " | ".join(f"`{f}`, not played" for f in LEFT_OUT)
        + " | both not played | used the tool there |",
        "|---|" + "---|" * (len(LEFT_OUT) + 3),
    ]
    for label, found in rows:
        left = [x for f in LEFT_OUT for x in found[f]]
        played = [x for f in families for x in found[f]]
        columns = [played, *(found[f] for f in LEFT_OUT), left, found["tool"]]
        out.append(f"| {label} | {' | '.join(map(cell, columns))} |")
    out += ["", "On the same problems (exact sign test):", ""]
    for i, j in ((0, 1), (1, 2)):
        if j < len(rows):
            out += [
                compared(rows[i], rows[j], LEFT_OUT, "not played"),
                compared(rows[i], rows[j], families, "played"),
            ]
    start, alone = (sum(sum(found[f]) for f in LEFT_OUT) for _, found in rows[:2])
    if alone >= start:
        out += ["", "RL alone lost nothing on the families left out: here replay has nothing to hold."]
    return "\n".join(out) + "\n"


def _listed(families: list[str]) -> str:
    *others, last = (f"`{f}`" for f in families)
    return f"{', '.join(others)} and {last}" if others else last


def cell(solved: list[int]) -> str:
    low, high = wilson_interval(sum(solved), len(solved))
    return f"{100 * sum(solved) / len(solved):.1f} ({100 * low:.0f}-{100 * high:.0f}, n={len(solved)})"


def compared(one: Any, other: Any, families: list[str], kind: str) -> str:
    pairs = [pair for f in families for pair in zip(one[1][f], other[1][f], strict=True)]
    won, lost = sum(b > a for a, b in pairs), sum(b < a for a, b in pairs)
    return (
        f"- {other[0]} against {one[0]}, families {kind}: {won} newly solved, {lost} no longer, of "
        f"{len(pairs)} (p = {sign_test(won, lost):.2g})"
    )


if __name__ == "__main__":
    main()
