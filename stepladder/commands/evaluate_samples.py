"""`stepladder eval` with several samples a task, a second model, or token budgets as an axis."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from stepladder.atomic import write_file
from stepladder.commands.evaluate import require_folder, require_writable, write_trajectories
from stepladder.commands.playground import Table, open_table, table_recipe
from stepladder.data.chat.renderer import Renderer
from stepladder.errors import ConfigError
from stepladder.evaluation import held_out
from stepladder.evaluation.beam import Beam, StepScorer, beam_agents
from stepladder.evaluation.calibration import calibration
from stepladder.evaluation.compare import by_domain, compare
from stepladder.evaluation.curves import Curve, Kind, Point, crossover, curve
from stepladder.evaluation.held_out import play_held_out
from stepladder.evaluation.samples import TaskSamples, read_samples
from stepladder.play.agent import Agents
from stepladder.plugins import load_object
from stepladder.reports.evaluation import evaluation_page, evaluation_plots
from stepladder.rewards.reward import Reward, as_reward
from stepladder.run.progress import Display
from stepladder.run.records import to_json
from stepladder.types import Message, Trajectory
from stepladder.workbench.model_rewards import model_reward, names_model


@dataclass(frozen=True, slots=True)
class Asked:
    """What is played and how it is read. `budgets`: sampled tokens a turn, the recipe's where empty."""

    environment: str
    overrides: Sequence[str] = ()
    tasks: int = 100
    split: str = "test"
    samples: int = 1
    ks: tuple[int, ...] = ()
    temperature: float = 1.0
    seed: int = 0
    endpoint_model: str = ""
    reward: str | None = None
    answer: str | None = None
    budgets: tuple[int, ...] = ()
    beam: Beam | None = None
    step_scorer: str | None = None

    def __post_init__(self) -> None:
        if (self.samples > 1 or self.beam) and self.temperature == 0:
            n = self.beam.num_samples if self.beam else self.samples
            raise ConfigError(f"{n} samples at temperature 0 are all the same; give --temperature 1.0")
        if (self.beam is None) != (self.step_scorer is None):
            raise ConfigError(
                "a beam search needs both --beam, the samples a step such as 16, and --step-scorer, the "
                "import path of f(messages, partials) -> scores"
            )
        if over := [k for k in self.ks if not 1 <= k <= self.samples]:
            raise ConfigError(
                f"k={over[0]} must lie between 1 and the samples of a task, {self.samples}; draw more "
                f"(--samples {max(over)}) or ask for fewer"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The k of the curves: as asked, else powers of 2 up to the samples, and all of them."""
        powers = [2**i for i in range(20) if 2**i <= self.samples]
        return tuple(sorted(set(self.ks or (*powers, self.samples))))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.samples == 1:
            return ("pass",)
        return ("pass", "maj", "best", "weighted") if self.reward else ("pass", "maj")


@dataclass(frozen=True, slots=True)
class Played:
    """One model under one budget."""

    model: str
    budget: int | None
    tasks: list[TaskSamples]
    curves: tuple[Curve, ...]
    seconds: float

    @property
    def failed(self) -> int:
        return sum(s.failed for task in self.tasks for s in task.samples)

    @property
    def first(self) -> Point:
        """pass@1."""
        return self.curves[0].points[0]


def evaluate_samples(
    model: str,
    asked: Asked,
    *,
    against: str | None = None,
    out: Path | None = None,
    report: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Play, count, compare, print; returns the summary that `report` holds as evaluation.json."""
    if model == against:
        raise ConfigError(f"--against {against} is the model itself; name another one, such as its base")
    require_writable(out)
    require_folder(report)
    played, kept = [], list[Trajectory]()
    for name in [model] if against is None else [model, against]:
        for one, trajectories in _play(name, asked):
            played.append(one)
            kept += trajectories
    summary = summarised(played, asked)
    _print(summary, console or Console())
    if out is not None:
        write_trajectories(out, kept)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        write_file(report / "evaluation.json", json.dumps(to_json(summary), indent=2) + "\n")
        write_file(report / "evaluation.html", evaluation_page(summary))
        for title, svg in evaluation_plots(summary):
            write_file(report / f"{title}.svg", str(svg))
    return summary


def _play(model: str, asked: Asked) -> list[tuple[Played, list[Trajectory]]]:
    recipe = table_recipe(
        model, asked.environment, asked.overrides, seed=asked.seed, endpoint_model=asked.endpoint_model
    )
    reward = _reward(asked.reward) if asked.reward else None
    answer = load_object(asked.answer, what="answer reader") if asked.answer else None
    found = []
    with open_table(recipe, model, asked.endpoint_model) as table:
        tasks = held_out(table.player.world, asked.split, asked.tasks)
        for budget in asked.budgets or (None,):
            began = time.monotonic()
            display = Display()
            display.start(f"evaluating {model}", len(tasks) * asked.samples, 0, unit="episodes")
            groups = table.runner.run(
                play_held_out(
                    table.player,
                    tasks,
                    n=asked.samples,
                    temperature=asked.temperature,
                    seed=asked.seed,
                    agents=_agents(table, asked, budget),
                    on_trajectory=display.trajectory,
                )
            )
            read = table.runner.run(read_samples(groups, answer=answer, reward=reward))
            display.stop()
            curves = tuple(curve(read, kind, asked.counts, seed=asked.seed) for kind in asked.kinds)
            one = Played(model, budget, read, curves, time.monotonic() - began)
            found.append((one, [t for group in groups for t in group.trajectories]))
    return found


def _agents(table: Table, asked: Asked, budget: int | None) -> Agents:
    """Plain sampling, or a search led by the step scorer."""
    if asked.beam is None or asked.step_scorer is None:
        return table.player.agents(asked.temperature, budget)
    if table.bench is None:
        raise ConfigError("a beam search continues token ids, which an endpoint does not take; name a model")
    bench, limits = table.bench, table.bench.recipe.rollout
    assert isinstance(bench.renderer, Renderer)
    return beam_agents(
        bench.engine,
        bench.renderer,
        step_scorer(asked.step_scorer),
        asked.beam,
        temperature=asked.temperature,
        max_tokens=budget or limits.max_tokens,
        max_context=limits.max_context,
    )


def _reward(text: str) -> Reward:
    return model_reward(text) if names_model(text) else as_reward(text)


def step_scorer(text: str) -> StepScorer:
    """By import path, or a model: "process_reward_model:PATH?aggregation=last" judges the last step."""
    if not names_model(text):
        scorer: StepScorer = load_object(text, what="step scorer")
        return scorer
    model: Any = model_reward(text).function

    def score(messages: Sequence[Message], partials: Sequence[str]) -> list[float]:
        found = model.scores([(*messages, Message("assistant", partial)) for partial in partials])
        return [-math.inf if value is None else value for value in found]

    return score


def summarised(played: Sequence[Played], asked: Asked) -> dict[str, Any]:
    """Everything as plain JSON."""
    out: dict[str, Any] = {
        "environment": asked.environment,
        "split": asked.split,
        "tasks": asked.tasks,
        "samples": asked.samples,
        "beam": dataclasses.asdict(asked.beam) if asked.beam else None,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "played": [_one(p, asked) for p in played],
        "comparisons": [],
    }
    names = list(dict.fromkeys(p.model for p in played))
    if len(names) == 2:
        ours, others = ([p for p in played if p.model == name] for name in names)
        out["comparisons"] = [_two(a, b, asked.seed) for a, b in zip(ours, others, strict=True)]
    return out


def _one(p: Played, asked: Asked) -> dict[str, Any]:
    domains: dict[str, list[float]] = {}
    for task in p.tasks:
        domains.setdefault(task.domain, []).append(task.solved / len(task.samples))
    episodes = [s for task in p.tasks for s in task.samples]
    return {
        "model": p.model,
        "budget": p.budget,
        "curves": {c.kind: [dataclasses.asdict(point) for point in c.points] for c in p.curves},
        "failed": p.failed,
        "episodes": len(episodes),
        "without_answer": sum(s.answer is None for s in episodes),
        "mean_tokens": sum(s.tokens for s in episodes) / len(episodes),
        "calibration": dataclasses.asdict(calibration(p.tasks)) if asked.samples > 1 else None,
        "by_domain": {d: {"n": len(v), "success": sum(v) / len(v)} for d, v in sorted(domains.items())},
        "by_task": [{"task": t.task, "solved": t.solved, "samples": len(t.samples)} for t in p.tasks],
        "seconds": p.seconds,
    }


def _two(one: Played, other: Played, seed: int) -> dict[str, Any]:
    domains = by_domain(one.tasks, other.tasks, seed=seed)
    return {
        "one": one.model,
        "other": other.model,
        "budget": one.budget,
        "overall": dataclasses.asdict(compare(one.tasks, other.tasks, seed=seed)),
        "by_domain": {d: dataclasses.asdict(c) for d, c in domains.items()},
        "passed": _passed(one.tasks, other.tasks, seed) if len(one.tasks[0].samples) > 1 else None,
    }


def _passed(one: Sequence[TaskSamples], other: Sequence[TaskSamples], seed: int) -> dict[str, Any]:
    """pass@k of all samples, and at which of all k the one behind at k = 1 has caught up."""
    n = len(one[0].samples)
    ours, others = (curve(tasks, "pass", range(1, n + 1), seed=seed) for tasks in (one, other))
    gap = ours.at(1).value - others.at(1).value
    return {
        "k": n,
        "last": dataclasses.asdict(compare(one, other, k=n, seed=seed)),
        "ahead": "one" if gap > 0 else "other" if gap < 0 else None,  # at k = 1
        "crossover": crossover(ours, others),
    }


def _print(summary: dict[str, Any], console: Console) -> None:
    for p in summary["played"]:
        budget = f", {p['budget']} tokens a turn" if p["budget"] else ""
        table = RichTable(title=f"{p['model']} on {summary['environment']}{budget}", box=None)
        table.add_column("samples")
        for kind in p["curves"]:
            table.add_column(f"{kind}@k", justify="right")
        for row in zip(*p["curves"].values(), strict=True):
            table.add_row(str(row[0]["k"]), *(share_text(point) for point in row))
        console.print(table)
        console.print(_remarks(p, summary), highlight=False)
    for c in summary["comparisons"]:
        for line in comparison_text(c):
            console.print(line, highlight=False)


def _remarks(p: dict[str, Any], summary: dict[str, Any]) -> str:
    text = (
        f"{summary['tasks']} tasks, {p['episodes']} episodes at temperature {summary['temperature']:g}; "
        f"{p['failed']} failed (counted as unsolved), {p['without_answer']} without an answer; "
        f"{p['mean_tokens']:.0f} tokens an episode; {p['seconds']:.0f} s"
    )
    if p["calibration"]:
        gap = p["calibration"]["gap"]
        sure = "surer than right" if gap > 0 else "less sure than right"
        text += f"; votes are off by {p['calibration']['ece']:.2f} (ECE), {abs(gap):.2f} {sure}"
    return text


def comparison_text(c: dict[str, Any]) -> list[str]:
    """What the paired comparison says, and which families were gained and lost."""
    all_ = c["overall"]
    low, high = all_["interval"]
    lines = [
        f"{c['one']} minus {c['other']}: {100 * all_['difference']:+.1f} points (95% {100 * low:+.1f} to "
        f"{100 * high:+.1f}); better on {all_['better']} tasks, worse on {all_['worse']}, equal on "
        f"{all_['equal']}; p = {all_['p']:.2g} (exact sign test)"
    ]
    for name, d in sorted(c["by_domain"].items(), key=lambda item: item[1]["difference"]):
        low, high = d["interval"]
        verdict = "lost" if high < 0 else "gained" if low > 0 else "not told apart"
        lines.append(
            f"  {name}: {d['other']:.0%} -> {d['one']:.0%} ({100 * low:+.0f} to {100 * high:+.0f}), {verdict}"
        )
    if c["passed"]:
        lines += _passed_text(c, c["passed"])
    return lines


def _passed_text(c: dict[str, Any], passed: dict[str, Any]) -> list[str]:
    """pass@k at the end, and the crossover, or that there is none."""
    k, last = passed["k"], passed["last"]
    low, high = last["interval"]
    text = (
        f"pass@{k}: {c['one']} {last['one']:.1%}, {c['other']} {last['other']:.1%}, difference "
        f"{100 * last['difference']:+.1f} points (95% {100 * low:+.1f} to {100 * high:+.1f})"
    )
    if passed["ahead"] is None:
        return [text, "pass@k: neither is ahead at k = 1"]
    ahead, behind = (c["one"], c["other"]) if passed["ahead"] == "one" else (c["other"], c["one"])
    if passed["crossover"] is None:
        return [text, f"pass@k: {behind} is behind {ahead} at every k from 1 to {k}: no crossover"]
    return [
        text,
        f"pass@k: {behind}, behind at k = 1, has caught up with {ahead} at k = {passed['crossover']}",
    ]


def share_text(point: dict[str, Any]) -> str:
    """A share with its interval."""
    return f"{100 * point['value']:.1f}% ({100 * point['low']:.1f} to {100 * point['high']:.1f})"
