"""`stepladder eval`: models or endpoints on any environment, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stepladder.atomic import write_file
from stepladder.commands.evaluation_text import print_evaluation
from stepladder.commands.output import require_folder, require_writable, write_trajectories
from stepladder.commands.playground import Playground, open_playground, playground_recipe
from stepladder.data.chat.renderer import Renderer
from stepladder.errors import ConfigError
from stepladder.evaluation import evaluate, held_out
from stepladder.evaluation.answers import answer_of
from stepladder.evaluation.asked import Asked
from stepladder.evaluation.beam import StepScorer, beam_agents
from stepladder.evaluation.summary import Played, summarised
from stepladder.play.agent import Agents
from stepladder.plugins import load_object
from stepladder.reports.evaluation import evaluation_page, evaluation_plots
from stepladder.run.progress import Display
from stepladder.run.records import to_json
from stepladder.types import Message
from stepladder.workbench.model_rewards import model_reward, named_reward, names_model


def evaluate_model(
    model: str,
    asked: Asked,
    *,
    against: str | None = None,
    out: Path | None = None,
    report: Path | None = None,
    console: Console | None = None,
) -> list[Played]:
    """Play, count, compare and print; `out` gets the trajectories, the folder `report` numbers and plots."""
    if model == against:
        raise ConfigError(f"--against {against} is the model itself; name another one, such as its base")
    require_writable(out)
    require_folder(report)
    played = [p for name in (model, against) if name is not None for p in _play(name, asked)]
    summary = summarised(played, asked)
    print_evaluation(summary, console or Console())
    if out is not None:
        write_trajectories(out, [t for p in played for t in p.result.trajectories])
    if report is not None:
        write_report(report, summary)
    return played


def write_report(folder: Path, summary: dict[str, Any]) -> None:
    """Write the summary as JSON, as a page, and its plots."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "evaluation.json", json.dumps(to_json(summary), indent=2) + "\n")
    write_file(folder / "evaluation.html", evaluation_page(summary))
    for title, svg in evaluation_plots(summary):
        write_file(folder / f"{title}.svg", str(svg))


def _play(model: str, asked: Asked) -> list[Played]:
    """Play the tasks under each budget."""
    recipe = playground_recipe(
        model, asked.environment, asked.overrides, seed=asked.seed, endpoint_model=asked.endpoint_model
    )
    reward = named_reward(asked.reward) if asked.reward else None
    answer = load_object(asked.answer, what="answer reader") if asked.answer else answer_of
    found = []
    with open_playground(recipe, model, asked.endpoint_model) as opened:
        tasks = held_out(opened.player.world, asked.split, asked.tasks)
        for budget in asked.budgets or (None,):
            display = Display()
            display.start(f"evaluating {model}", len(tasks) * asked.samples, 0, unit="episodes")
            result = opened.runner.run(
                evaluate(
                    opened.player,
                    tasks,
                    samples=asked.samples,
                    temperature=asked.temperature,
                    seed=asked.seed,
                    agents=_agents(opened, asked, budget),
                    answer=answer,
                    reward=reward,
                    on_trajectory=display.trajectory,
                )
            )
            display.stop()
            found.append(Played(model, budget, result))
    return found


def _agents(opened: Playground, asked: Asked, budget: int | None) -> Agents:
    """Return agents that sample plainly, or that search, led by the step scorer."""
    if asked.beam is None or asked.step_scorer is None:
        return opened.player.agents(asked.temperature, budget)
    if opened.bench is None:
        raise ConfigError("a beam search continues token ids, which an endpoint does not take; name a model")
    bench, limits = opened.bench, opened.bench.recipe.rollout
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


def step_scorer(text: str) -> StepScorer:
    """Return the judge of steps at an import path, or made of a model.

    "process_reward_model:PATH?aggregation=last" judges the last step.
    """
    if not names_model(text):
        scorer: StepScorer = load_object(text, what="step scorer")
        return scorer
    model: Any = model_reward(text).function

    def score(messages: Sequence[Message], partials: Sequence[str]) -> list[float]:
        found = model.scores([(*messages, Message("assistant", partial)) for partial in partials])
        return [-math.inf if value is None else value for value in found]

    return score
