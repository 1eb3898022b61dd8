"""Rejection sampling: the policy's own good episodes, fine-tuned on in the tokens they were sampled in.

    sample n episodes a task -> accept some -> supervised fine-tuning on them -> the next round

RAFT (arXiv:2304.06767) goes on from each round's policy, STaR (arXiv:2203.14465) fits the weights that the
rung began with again. Everything accepted lies in the run folder, for other trainers too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.planning.needs import Needs
from stepladder.play.rollout import derive_seed
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.rejection_sampling import RejectionSamplingSection
from stepladder.reports.run import read_jsonl
from stepladder.run.interrupt import uninterrupted
from stepladder.run.records import trajectory_from_dict
from stepladder.run.training_files import ACCEPTED, PAIRS, accepted_row, pair_row
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.episodes import refuse_dead_world, rollout_metrics
from stepladder.rungs.epochs import EpochState
from stepladder.rungs.fitting import FittingRung
from stepladder.rungs.reference import put_back, remembered
from stepladder.rungs.rejection_sampling.acceptance import count, shares, told
from stepladder.rungs.rejection_sampling.selection import Seen, accepted, best_and_worst, select
from stepladder.rungs.requirements import require_judge
from stepladder.rungs.run import Run
from stepladder.rungs.sampled_pairs import SAMPLED
from stepladder.rungs.tasks import TaskSampler, drawn_again
from stepladder.types import Group, TrainingSample, Trajectory
from stepladder.workbench.sources import Sources

START = "rejection_sampling_start.safetensors"
TRAJECTORIES = "accepted"  # trajectories/accepted.jsonl: what is fitted, with its tokens


@dataclass(slots=True)
class RoundState:
    """Where a round stands: everything a resumed run needs besides weights, the sampler and the fit."""

    round: int = 0  # finished ones
    drawn: int = 0  # tasks of this round that were sampled
    began: int = 0  # step that the round began after
    tally: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {"round": self.round, "drawn": self.drawn, "began": self.began, "tally": dict(self.tally)}


class RejectionSamplingRung(FittingRung):
    """Rounds of sampling, selection and fine-tuning in the recipe's environment.

    A sampled batch counts as a step, and so does an update.
    """

    name: ClassVar[str] = "rejection_sampling"
    syncs_engine: ClassVar[bool] = True
    fitted: ClassVar[str] = "round"

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        section: RejectionSamplingSection = cls.section_of(recipe)
        assert world is not None
        require_judge(recipe, world)
        there = world.count("train")
        if section.tasks > there:
            raise ConfigError(
                f"rejection_sampling.tasks={section.tasks} per round, but the split 'train' has {there}; set "
                f"rejection_sampling.tasks = {there}, and more samples"
            )

    @classmethod
    def needs(cls, section: RejectionSamplingSection) -> Needs:
        return Needs(
            rows=section.batch_size,
            token_budget=section.token_budget,
            keeps_best=bool(section.validation),
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.round = RoundState()
        self.seed = derive_seed(run.recipe.run.seed, self.name)  # RL draws other tasks, in another order
        self.sampler = TaskSampler(run.bench.world, "train", mode="uniform", seed=self.seed)

    @property
    def section(self) -> RejectionSamplingSection:
        section: RejectionSamplingSection = self.section_of(self.run.recipe)
        return section

    def climb(self) -> None:
        section, bench = self.section, self.run.bench
        start = None
        if section.restart:
            start = remembered(bench.policy, self.run.folder.path / START, must_exist=self.step > 0)
        while self.round.round < section.rounds:
            fresh = self.optimizer is None  # else a resumed run is inside the fit
            self._sample()
            samples, validation = self._accepted()
            if start is not None and fresh:
                put_back(bench.policy.model, start)
            self.fit(samples, validation, derive_seed(self.seed, self.round.round))
            with uninterrupted():
                self.before, self.progress = self.step, EpochState()
                self.round = RoundState(self.round.round + 1, began=self.before)
                bench.sync()
                if self.round.round < section.rounds:
                    self.run.save()

    # -- sampling -------------------------------------------------------------------------------------

    def _sample(self) -> None:
        section, run = self.section, self.run
        if self.round.drawn >= section.tasks:
            return
        seen = Seen()
        for trajectory in self._kept():
            seen.add(trajectory)
        left = math.ceil((section.tasks - self.round.drawn) / section.tasks_per_batch)
        run.display.start(f"{self.name}, sampling", self.before + left, self.before)
        while self.round.drawn < section.tasks:
            with drawn_again(self.sampler, lambda: self.round.drawn):
                began = time.monotonic()
                tasks = self.sampler.next(min(section.tasks_per_batch, section.tasks - self.round.drawn))
                groups = run.bench.play(
                    tasks,
                    group_size=section.samples,
                    temperature=section.temperature,
                    seed=self.seed,
                    on_trajectory=run.display.trajectory,
                )
                with uninterrupted():
                    refuse_dead_world(groups)
                    self.before += 1
                    self.round.drawn += len(tasks)
                    metrics = self._take(groups, seen)
                    metrics["seconds"] = time.monotonic() - began
                    run.log(self.name, self.before, metrics)
            run.save_if_due()
        run.display.note(f"round {self.round.round + 1}: {told(self.round.tally, section.samples)}")

    def _take(self, groups: Sequence[Group], seen: Seen) -> Metrics:
        """Select, write everything down, count. Shares and counts are those of the round so far."""
        section, folder = self.section, self.run.folder
        selected = [select(g, section, seen, seed=derive_seed(self.seed, g.id)) for g in groups]
        pairs = [pair for g in groups if (pair := best_and_worst(g, section)) is not None]
        kept = accepted(groups, selected)
        folder.log_rows(ACCEPTED, [accepted_row(t) for t in kept])
        folder.log_rows(PAIRS, [pair_row(*pair) for pair in pairs])
        both = [t for pair in pairs for t in pair]
        folder.log_trajectories(both, step=self.before, phase=SAMPLED, samples=True)
        folder.log_trajectories(kept, step=self.before, phase=TRAJECTORIES, samples=True)
        played = [t for g in groups for t in g.trajectories]
        folder.log_trajectories(played, step=self.before, phase=self.name)
        count(self.round.tally, groups, selected, pairs=len(pairs))
        return {
            **rollout_metrics(groups),
            **shares(self.round.tally),
            "round": float(self.round.round + 1),
        }

    # -- what is fitted -------------------------------------------------------------------------------

    def _kept(self) -> list[Trajectory]:
        """The accepted episodes of this round, as the run folder holds them."""
        path = self.run.folder.path / "trajectories" / f"{TRAJECTORIES}.jsonl"
        lines = [line for line in read_jsonl(path) if line["step"] > self.round.began]
        return [trajectory_from_dict({k: v for k, v in line.items() if k != "step"}) for line in lines]

    def _accepted(self) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """(training, validation) samples of this round, the tokens as they were sampled."""
        kept, section = self._kept(), self.section
        if not kept:
            raise DataError(
                f"round {self.round.round + 1} of rejection sampling kept nothing to fit: "
                f"{told(self.round.tally, section.samples)}. Sample more (rejection_sampling.samples = "
                f"{section.samples * 4}), take easier tasks, or warm the model up with [sft]"
            )
        train, held = split(kept, section.validation)
        if not train:
            raise DataError(
                f"rejection_sampling.validation={section.validation} holds back all {len(kept)} accepted "
                f"episodes; try {len(kept) // 5}"
            )
        return [s for t in train for s in t.samples], [s for t in held for s in t.samples]

    # -- the way back ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            **self.round.plain(),
            "before": self.before,
            "sampler": self.sampler.state(),
            "fit": super().state(),
        }

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.round = RoundState(**{key: state[key] for key in ("round", "drawn", "began", "tally")})
        self.before = state["before"]
        self.sampler.load(state["sampler"])
        super().load(state["fit"], tensors)


def split(kept: Sequence[Trajectory], validation: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, at least `validation` held out): the last tasks are held out whole, none is in both."""
    held: set[str] = set()
    while sum(t.task.id in held for t in kept) < min(validation, len(kept)):
        held.add(next(t.task.id for t in reversed(kept) if t.task.id not in held))
    return [t for t in kept if t.task.id not in held], [t for t in kept if t.task.id in held]
