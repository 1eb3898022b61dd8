"""`stepladder inspect`: the first batch of each rung as coloured tokens, before any training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text
from torch import Tensor

from stepladder.commands.inspect_scoring import show_ranked, show_steps
from stepladder.data.files.records import Demonstration, Unpaired
from stepladder.recipe.config import Recipe
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.rungs.demonstrations import sft_data
from stepladder.rungs.episodes import refuse_dead_world, rollout_metrics
from stepladder.rungs.preference.data import judged_data, pair_data, preference_rows
from stepladder.rungs.registry import prepare_run
from stepladder.rungs.rl.credit import make_batch
from stepladder.rungs.rl.rung import own_advantage
from stepladder.rungs.rl.shaping import shaped
from stepladder.rungs.rl.state import RlState, credit_rules, shaping_rules
from stepladder.rungs.tasks import TaskSampler
from stepladder.types import Message, TrainingSample
from stepladder.workbench.bench import Workbench

LEGEND = (
    ("template", "dim"),
    ("prompt", "cyan"),
    ("environment and tools", "magenta"),
    ("trained, imitated or advantage > 0", "green"),
    ("trained, advantage < 0", "red"),
    ("sampled, advantage 0", "yellow"),
    ("not trained, said by an assistant", "blue"),
)


def inspect_recipe(recipe: Recipe, *, samples: int, console: Console | None = None) -> None:
    """Print up to `samples` samples of the first batch of each rung."""
    console = console or Console()
    with contextlib.closing(prepare_run(recipe)) as bench:
        console.print(
            Text("   ").join(Text(what, style) for what, style in LEGEND),
        )
        if recipe.sft is not None:
            data = sft_data(bench, recipe.sft, seed=recipe.run.seed)
            console.rule(f"sft: {len(data.train)} samples to train on, {len(data.held)} held out")
            console.print(data.text, highlight=False, markup=False)
            for sample in data.train[:samples]:
                row = data.rows.train[int(sample.trajectory_id.removeprefix("demo-"))]
                messages = row.messages if isinstance(row, Demonstration) else ()
                turns = sum(m.role == "assistant" for m in messages)
                text = coloured(bench, sample, 1.0, messages, turns=turns)
                _show(console, sample, text, sample.trajectory_id)
        if recipe.preference is not None and recipe.preference.data != EARLIER_RUNG:
            _show_preferences(console, bench, recipe.preference, samples, seed=recipe.run.seed)
        if recipe.reward_model is not None:
            show_ranked(console, bench, recipe.reward_model, samples, seed=recipe.run.seed)
        process = recipe.process_reward_model
        if process is not None and not process.tasks:
            show_steps(console, bench, process, samples, seed=recipe.run.seed)
        if recipe.rl is not None:
            _show_rollouts(console, bench, recipe, samples)


def _show_preferences(
    console: Console, bench: Workbench, settings: PreferenceSection, samples: int, *, seed: int
) -> None:
    """The first answers: green is pushed up, red is pushed down."""
    notes: list[str] = []
    rows, held_rows = preference_rows(bench, settings, Path(), seed=seed, say=notes.append)
    answers: list[tuple[str, float, TrainingSample]] = []
    if settings.loss == "kto":
        judged, tally = judged_data(bench, rows, held_rows, settings, seed=seed)
        for one in judged.train:
            answers.append(
                ("good", 1.0, one.answer.sample) if one.desirable else ("bad", -1.0, one.answer.sample)
            )
    else:
        pairs, tally = pair_data(bench, rows, held_rows, settings)
        for pair in pairs.train:
            answers += [("chosen", 1.0, pair.chosen.sample), ("rejected", -1.0, pair.rejected.sample)]
    console.rule(f"preference ({settings.loss}): {tally.text}; {len(held_rows)} held out")
    console.print("; ".join(notes), markup=False)
    for name, sign, sample in answers[:samples]:
        row = rows[int(sample.group_id.rpartition("-")[2])]
        said = row.completion if isinstance(row, Unpaired) else row.chosen if sign > 0 else row.rejected
        turns = sum(message.role == "assistant" for message in (*row.prompt, *said))
        text = coloured(bench, sample, sign, (*row.prompt, *said), turns=turns)
        _show(console, sample, text, f"{sample.group_id} {name}")


def _show_rollouts(console: Console, bench: Workbench, recipe: Recipe, samples: int) -> None:
    settings = recipe.rl
    assert settings is not None
    sampler = TaskSampler(bench.world, "train", mode=settings.sampling, seed=recipe.run.seed)
    tasks = sampler.next(min(settings.tasks_per_step, max(1, samples)))
    groups = bench.play(tasks, group_size=settings.group_size, seed=recipe.run.seed)
    refuse_dead_world(groups)
    metrics = rollout_metrics(groups)
    console.rule(f"rl: {len(groups)} groups of {settings.group_size}, by the model as it is now")
    console.print(
        f"reward {metrics['reward']:.3f}, success {metrics['success']:.0%}, tool use "
        f"{metrics['tool_rate']:.0%}, groups without signal {metrics['dead_groups']:.0%}",
        highlight=False,
    )
    state = RlState()
    groups = shaped(groups, shaping_rules(settings, state, recipe.rollout.max_tokens))
    batch = make_batch(groups, settings.row(), credit_rules(settings, state, own_advantage(settings)))
    # The strongest signals first: those are what the first update is about.
    strengths = [_mean(batch.advantages[i], sample) for i, sample in enumerate(batch.samples)]
    order = sorted(range(len(batch.samples)), key=lambda i: -abs(strengths[i]))
    played = {t.id: t for group in groups for t in group.trajectories}
    for i in order[:samples]:
        sample = batch.samples[i]
        advantage = strengths[i]
        trajectory = played[sample.trajectory_id]
        text = coloured(bench, sample, advantage, trajectory.messages, turns=len(trajectory.turns))
        _show(console, sample, text, f"{sample.trajectory_id}  advantage {advantage:+.3f}")


def _mean(advantage: Tensor, sample: TrainingSample) -> float:
    """A sample's advantage; of one that differs from token to token, the mean over the trained ones."""
    return float(advantage.sum()) / sample.num_trained if advantage.dim() else float(advantage)


def _show(console: Console, sample: TrainingSample, text: Text, title: str) -> None:
    console.print(f"[bold]{title}[/]  {sample.num_trained} of {len(sample.token_ids)} tokens trained")
    console.print(text)
    console.print()


def coloured(
    bench: Workbench, sample: TrainingSample, advantage: float, messages: Sequence[Message], *, turns: int
) -> Text:
    """The sample's tokens, joined, in the colours of `LEGEND`; trained context (`train = "full"`) underlined.

    What the policy wrote, and what is trained, is read from the sample. Who wrote the rest is found by
    looking for the texts of `messages`, whose last `turns` assistant messages are the policy's turns; what
    is not found is shown as the template's. That is for the eye only.
    """
    signal = "green" if advantage > 0 else "red" if advantage < 0 else "yellow"
    said = [i for i, m in enumerate(messages) if m.role == "assistant"]
    said = [*said[max(len(said) - turns, 0) :], len(messages)]
    text, at = Text(), 0
    for start, end in _stretches(list(zip(sample.mask, sample.turn_ids, strict=True))):
        piece = bench.renderer.decode(sample.token_ids[start:end])
        trained, turn = sample.mask[start], sample.turn_ids[start]
        if turn >= 0:
            text.append(piece, signal if trained else "blue")
            at = said[min(turn, len(said) - 1)] + 1
            continue
        following = next((t for t in sample.turn_ids[end:] if t >= 0), len(said))
        until = said[min(following, len(said) - 1)]
        authors = [(m.text, _author(m, at + k < said[0])) for k, m in enumerate(messages[at:until])]
        for part, style in _placed(piece, authors):
            text.append(part, f"{style} underline" if trained else style)
    return text


def _author(message: Message, opening: bool) -> str:
    if message.role == "assistant":
        return "blue"
    return "cyan" if opening and message.role != "tool" else "magenta"


def _placed(piece: str, authors: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """`piece` cut at the texts that are found in it, one after the other; the rest is dim.

    >>> _placed("<u>hi</u>", [("hi ", "cyan"), ("gone", "magenta")])
    [('<u>', 'dim'), ('hi', 'cyan'), ('</u>', 'dim')]
    """
    out, at = [], 0
    for words, style in authors:
        found = piece.find(words.strip(), at)
        if found >= 0 and words.strip():
            out += [(piece[at:found], "dim"), (words.strip(), style)]
            at = found + len(words.strip())
    return [(part, style) for part, style in [*out, (piece[at:], "dim")] if part]


def _stretches(mask: Sequence[object]) -> list[tuple[int, int]]:
    """Maximal stretches of equal values.

    >>> _stretches((False, False, True))
    [(0, 2), (2, 3)]
    """
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
