"""The first rows of a reward model's data, for `stepladder inspect`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.rungs.reward_model.ranking_data import ranked_data
from stepladder.rungs.reward_model.scoring_files import Report
from stepladder.rungs.reward_model.step_data import step_data
from stepladder.workbench.bench import Workbench

PLACES = ("green", "red")  # the better answer, the worse ones


def _printed(console: Console) -> Report:
    return lambda text, _: console.print(text, markup=False)


def show_ranked(
    console: Console, bench: Workbench, settings: RewardModelSection, samples: int, *, seed: int
) -> None:
    """The first answers, best first; the score is read at the underlined last token."""
    train, held = ranked_data(bench, settings, seed=seed, report=_printed(console))
    console.rule(f"reward_model: {len(train)} rows to train on, {len(held)} held out")
    shown = [(row, k, sample) for row in train for k, sample in enumerate(row.samples)]
    for row, k, sample in shown[:samples]:
        beaten = sum(k == better for better in row.better)
        console.print(f"[bold]{sample.group_id}[/]  better than {beaten} of {len(row.samples) - 1}")
        text = Text(bench.renderer.decode(sample.token_ids[:-1]), PLACES[beaten == 0])
        text.append(bench.renderer.decode(sample.token_ids[-1:]), f"{PLACES[beaten == 0]} underline")
        console.print(text)
        console.print()


def show_steps(
    console: Console, bench: Workbench, settings: ProcessRewardModelSection, samples: int, *, seed: int
) -> None:
    """The first solutions; each step ends at an underlined token, green where its label is above a half."""
    train, held = step_data(bench, settings, Path(), seed=seed, report=_printed(console))
    console.rule(f"process_reward_model: {len(train)} solutions to train on, {len(held)} held out")
    for row in train[:samples]:
        console.print(f"[bold]{row.sample.group_id}[/]  {len(row.ends)} steps")
        text, at = Text(), 0
        for end, label in zip(row.ends, row.labels, strict=True):
            colour = "green" if label > 0.5 else "red"
            text.append(bench.renderer.decode(row.sample.token_ids[at:end]), colour if at else "dim")
            text.append(bench.renderer.decode(row.sample.token_ids[end : end + 1]), f"{colour} underline")
            at = end + 1
        text.append(bench.renderer.decode(row.sample.token_ids[at:]), "dim")
        console.print(text)
        console.print()
