"""Provoke an echo trap and a template collapse, rescue the same seeds, and hear nothing from healthy runs.

    python bench/alarms.py --out runs/alarms                 # everything, about half an hour on one core
    python bench/alarms.py --only provoke --seeds 0          # the two collapses, each with and without remedy

Writes a table to --table and a picture to --picture. A collapse and its rescue are the same recipe and seed
in exact mode, so they are one run until the alarm, which is checked.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alarm_plot import picture
from alarm_worlds import SYMBOLS
from algorithms import COMMON, NAMES, SETTINGS

from stepladder.diagnostics.monitor import Monitor
from stepladder.ladder import train
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display

HERE = Path(__file__).parent
SMALL = {"hidden": 32, "layers": 2, "intermediate": 48, "max_positions": 128}
BONUS = f'environment.rewards=["{HERE}/alarm_worlds.py:surprise"]'


@dataclass(frozen=True)
class Run:
    """What one run showed."""

    metrics: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    held_out: float  # greedy, on 100 tasks of the test split

    def column(self, name: str) -> list[float]:
        return [float("nan") if m.get(name) is None else m[name] for m in self.metrics]

    def success(self) -> list[float]:
        return smoothed(self.column("success"))

    def first(self, alarm: str) -> int | None:
        return next((a["step"] for a in self.alarms if a["name"] == alarm), None)

    def fell(self) -> int | None:
        """The step at which smoothed success is first below half its peak so far."""
        peak = 0.0
        for step, value in enumerate(self.success(), start=1):
            peak = max(peak, value) if step >= 5 else peak
            if value < 0.5 * peak:
                return step
        return None

    def last(self, name: str = "success") -> float:
        values = [v for v in self.column(name)[-10:] if v == v]
        return sum(values) / max(len(values), 1)


def smoothed(values: Sequence[float], weight: float = 0.2) -> list[float]:
    out: list[float] = []
    for value in values:
        out.append(value if not out else (1 - weight) * out[-1] + weight * value)
    return out


# -- recipes -----------------------------------------------------------------------------------------------


def digit(algorithm: str) -> list[Any]:
    """The bundled hidden_digit as in algorithms.py, with four updates a batch: every algorithm learns it."""
    return ["hidden_digit", [*COMMON, f"rl.algorithm={algorithm}", *SETTINGS.get(algorithm, ())]]


def think(*overrides: str) -> list[Any]:
    """ThinkWorld of `alarm_worlds.py` on a model of 40,000 weights."""
    data = {
        "model": {"name": "tiny", "dtype": "float32", "options": {"symbols": SYMBOLS, **SMALL}},
        "environment": {"name": f"{HERE}/alarm_worlds.py:ThinkWorld"},
        "rollout": {"max_turns": 2, "max_tokens": 4, "max_context": 32},
        "sft": {
            "demonstrations": 256,
            "epochs": 16,
            "batch_size": 32,
            "learning_rate": 5e-3,
            "validation": 0,
        },
        "rl": {
            "kl": {"coefficient": 0.0},
            "steps": 60,
            "tasks_per_step": 8,
            "group_size": 8,
            "learning_rate": 3e-3,
            "aggregation": "token_mean",
        },
    }
    return [data, list(overrides)]


ECHO = (  # two digits, so that luck seldom finds what was lost; one batch used six times, without a clip
    "environment.options.digits=2",
    "environment.options.noise=0.2",
    "sft.demonstrations=512",
    "rl.algorithm=reinforce++",
    "rl.clip.low=0.99",
    "rl.clip.high=100.0",
    "rl.updates_per_batch=6",
    "rl.tasks_per_step=12",
    "rl.learning_rate=2e-3",
    "rl.steps=90",
)
TEMPLATE = (
    "environment.options.hopeless=0.6",
    BONUS,
    "sft.demonstrations=512",  # without which some seeds do not look at their prompts to begin with
    "rl.steps=80",
)
PROVOKED = {"echo_trap": think(*ECHO), "template_collapse": think(*TEMPLATE)}
HEALTHY: dict[str, tuple[list[Any], tuple[int, ...]]] = {
    "think, grpo": (think("rl.steps=50"), (0, 1)),
    "think, dr_grpo": (think("rl.algorithm=dr_grpo", "rl.aggregation=constant", "rl.steps=50"), (0, 1)),
    "think, dapo": (think("rl.algorithm=dapo", "rl.tasks.dynamic_sampling=false", "rl.steps=50"), (0, 1)),
    "think, cispo": (think("rl.algorithm=cispo", "rl.steps=50"), (0,)),
    "think, gspo": (think("rl.algorithm=gspo", "rl.steps=50"), (0,)),
    "think, reinforce++": (think("rl.algorithm=reinforce++", "rl.steps=50"), (0,)),
    **{f"hidden_digit, {name}": (digit(name), (3,)) for name in NAMES},
}


def play(out: Path, name: str, seed: int, source: list[Any], *overrides: str) -> Run:
    """Train once, or read what an earlier call has left."""
    shared = (
        f"run.out={out}",
        f"run.name={name}",
        f"run.seed={seed}",
        "run.exact=true",
        "run.threads=1",
        "run.checkpoint_every=100000",
        "evaluation.raw=0",
        "evaluation.tasks=100",
    )
    folder = out / name
    if not _finished(folder):
        recipe = load_recipe(source[0], [*source[1], *shared, *overrides])
        train(recipe, overwrite=True, display=Display(quiet=True))
    metrics = [m for m in _lines(folder / "metrics.jsonl") if m["phase"] == "rl"]
    return Run(metrics, _asked(metrics), _lines(folder / "evaluations.jsonl")[-1]["success"])


def _asked(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the alarms of today say of a run, whichever there were when it was made."""
    monitor, out = Monitor(), []
    for line in metrics:
        numbers = {k: math.nan if v is None else v for k, v in line.items() if k != "phase"}
        out += [alarm.plain() for alarm in monitor.see(int(line["step"]), numbers)]
    return out


def _finished(folder: Path) -> bool:
    return (folder / "final" / "config.json").is_file()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the table ---------------------------------------------------------------------------------------------


def provoke(
    out: Path, seeds: Sequence[int], *, finished: bool = False
) -> Iterator[tuple[str, int, Run, Run]]:
    for alarm, source in PROVOKED.items():
        for seed in seeds:
            if finished and not _finished(out / f"{alarm}-{seed}-remedy"):
                continue
            left = play(out, f"{alarm}-{seed}", seed, source)
            rescued = play(out, f"{alarm}-{seed}-remedy", seed, source, "rl.on_alarm=remedy")
            at = min((a["step"] for a in left.alarms), default=len(left.metrics))
            for name in ("reward", "success", "surprisal"):
                assert str(left.column(name)[:at]) == str(rescued.column(name)[:at]), (alarm, seed, name)
            yield alarm, seed, left, rescued


def provoked_line(alarm: str, seed: int, left: Run, rescued: Run) -> str:
    others = sorted({a["name"] for a in left.alarms} - {alarm})
    at = left.first(alarm)
    then = "    -" if at is None else f"{left.success()[at - 1] / max(left.success()[:at]):5.2f}"
    return (
        f"{alarm:18} {seed:4}  {_step(at)}  {then}  {_step(left.fell())}  {max(left.success()):5.2f}  "
        f"{left.last():5.2f}  {left.held_out:8.2f}  {rescued.last():9.2f}  {rescued.held_out:8.2f}   "
        f"{', '.join(others) or '-'}"
    )


def healthy_line(label: str, seed: int, run: Run) -> str:
    heard = ", ".join(f"{a['name']}@{a['step']}" for a in run.alarms) or "none"
    return (
        f"{label:25} {seed:4}  {len(run.metrics):5}  {run.success()[0]:5.2f}  {run.last():5.2f}  "
        f"{run.held_out:8.2f}   {heard}"
    )


def commit() -> str:
    got = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return got.stdout.strip() or "unknown"


def _step(step: int | None) -> str:
    return "    -" if step is None else f"{step:5}"


HEAD = (
    "Provoked. alarm: the step of its first alarm. then: success (moving average, weight .2) at that step as",
    "a share of its peak so far. fell: the step at which it is first below half its peak. end: success of",
    "the last 10 steps. held-out: greedy, 100 tasks. rescued: the same seed with rl.on_alarm = 'remedy'. In",
    "the template collapse a share of .6 of the tasks is hopeless: at most .4 can be solved. The alarms were",
    "adjusted to seeds 0 to 2; seeds 3 and 4 were first looked at afterwards.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/alarms"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--finished", action="store_true", help="only runs that an earlier call has left")
    parser.add_argument("--only", choices=("provoke", "healthy"))
    parser.add_argument("--table", type=Path, default=HERE / "results" / "alarms.txt")
    parser.add_argument("--picture", type=Path, default=HERE / "results" / "alarms.svg")
    args = parser.parse_args()
    out: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        out.append(line)
        args.table.write_text("\n".join(out) + "\n")

    say(f"Made by `python bench/alarms.py`, tiny models in float32 on one core, commit {commit()}.")
    say("")
    if args.only != "healthy":
        for line in HEAD:
            say(line)
        columns = "seed  alarm   then   fell   peak    end  held-out    rescued  held-out   other alarms"
        say(f"{'collapse':18} {columns}")
        shown = []
        for alarm, seed, left, rescued in provoke(args.out, args.seeds, finished=args.finished):
            say(provoked_line(alarm, seed, left, rescued))
            if seed == args.seeds[0]:
                signal = "reward_std" if alarm == "echo_trap" else "prompt_information"
                shown.append((alarm, left.first(alarm), signal, left, rescued))
        args.picture.write_text(
            picture(
                [
                    (alarm, at, left.success(), rescued.success(), signal, left.column(signal))
                    for alarm, at, signal, left, rescued in shown
                ]
            )
        )
        say("")
    if args.only != "provoke":
        say("Healthy. success at the first step, of the last 10 steps, held-out; alarms")
        say("run                       seed  steps  start    end  held-out   alarms")
        for label, (source, seeds) in HEALTHY.items():
            for seed in seeds:
                name = f"healthy-{label.replace(', ', '-')}-{seed}"
                if args.finished and not _finished(args.out / name):
                    say(f"{label:25} {seed:4}  not run")
                    continue
                say(healthy_line(label, seed, play(args.out, name, seed, source)))


if __name__ == "__main__":
    main()
