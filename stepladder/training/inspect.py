"""`stepladder inspect`: the first batch of each rung as coloured tokens, before any training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from stepladder.config import Recipe
from stepladder.rollout import rollout
from stepladder.training.demonstrations import sft_samples
from stepladder.training.rl import make_batch, refuse_dead_world, rollout_metrics
from stepladder.training.setup import Workbench, prepare
from stepladder.training.tasks import TaskSampler
from stepladder.types import TrainingSample


def inspect_recipe(recipe: Recipe, *, samples: int, console: Console | None = None) -> None:
    """Print up to `samples` samples of the first SFT batch and of the first RL batch."""
    console = console or Console()
    with contextlib.closing(prepare(recipe)) as bench:
        console.print(
            Text.assemble(
                ("context, not trained", "dim"),
                "   ",
                ("trained, imitated or advantage > 0", "green"),
                "   ",
                ("trained, advantage < 0", "red"),
                "   ",
                ("sampled, advantage 0", "yellow"),
            )
        )
        if recipe.sft is not None:
            train, held = sft_samples(bench, recipe.sft, seed=recipe.run.seed)
            console.rule(f"sft: {len(train)} samples to train on, {len(held)} held out")
            for sample in train[:samples]:
                _show(console, bench, sample, 1.0, f"{sample.trajectory_id}")
        if recipe.rl is not None:
            _show_rollouts(console, bench, recipe, samples)


def _show_rollouts(console: Console, bench: Workbench, recipe: Recipe, samples: int) -> None:
    settings = recipe.rl
    assert settings is not None
    sampler = TaskSampler(bench.world, "train", mode=settings.sampling, seed=recipe.run.seed)
    tasks = sampler.next(min(settings.tasks_per_step, max(1, samples)))
    groups = bench.runner.run(
        rollout(
            bench.agents(recipe.rollout.temperature),
            bench.world,
            tasks,
            group_size=settings.group_size,
            limits=bench.limits,
            seed=recipe.run.seed,
            scorer=bench.scorer,
        )
    )
    refuse_dead_world(groups)
    metrics = rollout_metrics(groups)
    console.rule(f"rl: {len(groups)} groups of {settings.group_size}, by the model as it is now")
    console.print(
        f"reward {metrics['reward']:.3f}, success {metrics['success']:.0%}, tool use "
        f"{metrics['tool_rate']:.0%}, groups without signal {metrics['dead_groups']:.0%}",
        highlight=False,
    )
    batch = make_batch(groups, settings.row())
    # The strongest signals first: those are what the first update is about.
    order = sorted(range(len(batch.samples)), key=lambda i: -abs(float(batch.advantages[i])))
    for i in order[:samples]:
        sample = batch.samples[i]
        advantage = float(batch.advantages[i])
        _show(console, bench, sample, advantage, f"{sample.trajectory_id}  advantage {advantage:+.3f}")


def _show(console: Console, bench: Workbench, sample: TrainingSample, advantage: float, title: str) -> None:
    console.print(f"[bold]{title}[/]  {sample.num_trained} of {len(sample.token_ids)} tokens trained")
    console.print(coloured(bench, sample, advantage))
    console.print()


def coloured(bench: Workbench, sample: TrainingSample, advantage: float) -> Text:
    """The sample's tokens, joined; neighbours of one colour are decoded together."""
    style = "green" if advantage > 0 else "red" if advantage < 0 else "yellow"
    text = Text()
    for start, end in _stretches(sample.mask):
        piece = bench.renderer.decode(sample.token_ids[start:end])
        text.append(piece, style if sample.mask[start] else "dim")
    return text


def _stretches(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Maximal stretches of equal mask values.

    >>> _stretches((False, False, True))
    [(0, 2), (2, 3)]
    """
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
