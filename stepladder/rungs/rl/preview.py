"""The first batch of RL, played by the model as it is: the samples with the strongest signals."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stepladder.recipe.rl import RlSection
from stepladder.rungs.coloured import shown
from stepladder.rungs.episodes import refuse_dead_world, rollout_metrics
from stepladder.rungs.preview import Preview
from stepladder.rungs.rl.credit import make_batch
from stepladder.rungs.rl.shaping import shaped
from stepladder.rungs.rl.state import RlState, credit_rules, shaping_rules
from stepladder.rungs.tasks import TaskSampler
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench


def first_batch(bench: Workbench, settings: RlSection, own_advantage: Any, samples: int) -> Preview:
    """Play a batch, and return its samples, those with the strongest advantages first."""
    seed = bench.recipe.run.seed
    sampler = TaskSampler(bench.world, "train", mode=settings.tasks.sampling, seed=seed)
    tasks = sampler.next(min(settings.tasks_per_step, max(1, samples)))
    groups = bench.play(tasks, group_size=settings.group_size, seed=seed)
    refuse_dead_world(groups)
    metrics = rollout_metrics(groups)
    headline = f"rl: {len(groups)} groups of {settings.group_size}, by the model as it is now"
    note = (
        f"reward {metrics['reward']:.3f}, success {metrics['success']:.0%}, tool use "
        f"{metrics['tool_rate']:.0%}, groups without signal {metrics['dead_groups']:.0%}"
    )
    state = RlState()
    groups = shaped(groups, shaping_rules(settings, state, bench.recipe.rollout.max_tokens))
    batch = make_batch(groups, settings.row(), credit_rules(settings, state, own_advantage))
    played = {t.id: t for group in groups for t in group.trajectories}
    # The strongest signals first: those are what the first update is about.
    strengths = [_mean(batch.advantages[i], sample) for i, sample in enumerate(batch.samples)]
    order = sorted(range(len(batch.samples)), key=lambda i: -abs(strengths[i]))
    first = []
    for i in order[:samples]:
        sample, advantage = batch.samples[i], strengths[i]
        trajectory = played[sample.trajectory_id]
        title = f"{sample.trajectory_id}  advantage {advantage:+.3f}"
        turns = len(trajectory.turns)
        first.append(shown(bench.renderer, sample, title, advantage, trajectory.messages, turns=turns))
    return Preview(headline, [note], first)


def _mean(advantage: Tensor, sample: TrainingSample) -> float:
    """Return a sample's advantage; where it differs from token to token, the mean over the trained ones."""
    return float(advantage.sum()) / sample.num_trained if advantage.dim() else float(advantage)
