"""Distillation from a teacher's probabilities: on what the policy samples, on conversations, or on both.

    sample (or take conversations) -> the teacher scores every token -> update -> sync -> repeat

GKD (arXiv:2306.13649); with on_policy = 1 on-policy distillation (K. Lu, 2025). From a teacher's samples
alone it is supervised fine-tuning: `stepladder sample TEACHER`, then `sft.data`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from stepladder.data.files.datasets import read_dataset
from stepladder.environments.checked import CheckedWorld
from stepladder.planning.needs import Needs
from stepladder.play.rollout import derive_seed
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.distillation import DistillationSection
from stepladder.recipe.sft import SftSection
from stepladder.run.interrupt import uninterrupted
from stepladder.rungs.accumulate import Metrics
from stepladder.rungs.base import Rung
from stepladder.rungs.demonstrations import sft_data
from stepladder.rungs.distillation.teacher import check_teacher, load_teacher
from stepladder.rungs.distillation.update import distillation_update
from stepladder.rungs.episodes import refuse_dead_world, rollout_metrics
from stepladder.rungs.epochs import shuffled
from stepladder.rungs.requirements import require_maker
from stepladder.rungs.run import Run
from stepladder.rungs.tasks import TaskSampler, drawn_again
from stepladder.types import Group, TrainingSample
from stepladder.workbench.sources import Sources


@dataclass(slots=True)
class DistillationState:
    """Where the loop stands; `taken`: batches of conversations that were used."""

    step: int = 0
    seconds: float = 0.0
    taken: int = 0


class DistillationRung(Rung):
    """Steps towards the teacher. Which steps are on-policy follows from the seed and the step alone."""

    name: ClassVar[str] = "distillation"
    syncs_engine: ClassVar[bool] = True

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        section: DistillationSection = cls.section_of(recipe)
        if section.demonstrations:
            assert world is not None
            require_maker(
                recipe,
                world.demonstrates,
                key="distillation.demonstrations",
                what="demonstrations",
                method="demonstrations",
                instead="give {data}",
            )
        if section.data is not None:
            read_dataset(section.data, "demonstration")

    @classmethod
    def check_policy(cls, recipe: CommonRecipe, policy: Policy) -> None:
        check_teacher(cls.section_of(recipe), policy.tokenizer)

    @classmethod
    def needs(cls, section: DistillationSection) -> Needs:
        plays = section.on_policy > 0
        return Needs(
            rows=section.tasks_per_step if plays else section.batch_size,
            token_budget=section.token_budget,
            answers=section.samples if plays else 1,
            steps=section.steps,
            teacher=section.teacher,
            teacher_dtype=section.teacher_dtype,
            plays=plays,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = DistillationState()
        self.seed = derive_seed(run.recipe.run.seed, self.name)
        self.sampler: TaskSampler | None = None
        if self.section.on_policy > 0:
            self.sampler = TaskSampler(run.bench.world, "train", mode="uniform", seed=self.seed)

    @property
    def section(self) -> DistillationSection:
        section: DistillationSection = self.section_of(self.run.recipe)
        return section

    @property
    def step(self) -> int:
        return self.progress.step

    def climb(self) -> None:
        run, section = self.run, self.section
        teacher = load_teacher(section, run.bench.policy)
        conversations = self._conversations()
        with self.training(run.bench.policy.model, section.max_grad_norm) as optimizer:
            run.display.start(self.name, section.steps, self.step)
            while self.step < section.steps and not self._out_of_time():
                self._step(optimizer, teacher, conversations)
                if self.step % run.recipe.run.checkpoint_every == 0:
                    run.save()
        if section.on_policy == 0:
            run.bench.sync()

    def _step(
        self, optimizer: MasterOptimizer, teacher: Policy, conversations: Sequence[TrainingSample]
    ) -> None:
        run, section, state = self.run, self.section, self.progress
        draw = random.Random(f"{self.seed}/on-policy/{state.step}").random()
        with drawn_again(self.sampler, lambda: state.step):
            began = time.monotonic()
            on_policy = draw < section.on_policy
            groups = self._sampled() if on_policy else []
            with uninterrupted():
                metrics: Metrics = {"on_policy": float(on_policy)}
                if on_policy:
                    refuse_dead_world(groups)
                    metrics |= rollout_metrics(groups)
                    run.bench.engine.rest()
                samples = of_groups(groups) if on_policy else self._batch(conversations)
                metrics |= self._update(optimizer, teacher, samples)
                if section.on_policy > 0:
                    run.bench.sync()
                state.step += 1
                state.taken += not on_policy
                metrics["seconds"] = time.monotonic() - began
                state.seconds += metrics["seconds"]
                run.log(self.name, state.step, metrics)
                played = [t for g in groups for t in g.trajectories]
                if played:
                    run.folder.log_trajectories(played, step=state.step, phase=self.name)

    def _update(
        self, optimizer: MasterOptimizer, teacher: Policy, samples: Sequence[TrainingSample]
    ) -> Metrics:
        section, bench = self.section, self.run.bench
        rate = warmup_then_constant(self.step, peak=section.learning_rate, warmup=section.warmup_steps)
        return bench.memory.fit(
            samples,
            section.token_budget,
            optimizer,
            lambda tokens: distillation_update(
                bench.policy,
                teacher,
                optimizer,
                samples,
                loss=section.loss,
                beta=section.beta,
                temperature=self._temperature,
                learning_rate=rate,
                token_budget=tokens,
            ),
        )

    @property
    def _temperature(self) -> float:
        return self.section.temperature or self.run.recipe.rollout.temperature

    def _sampled(self) -> list[Group]:
        bench, section = self.run.bench, self.section
        assert self.sampler is not None
        return bench.play(
            self.sampler.next(section.tasks_per_step),
            group_size=section.samples,
            temperature=self._temperature,
            seed=self.seed,
            on_trajectory=self.run.display.trajectory,
        )

    def _conversations(self) -> list[TrainingSample]:
        section = self.section
        if section.on_policy == 1:
            return []
        source = SftSection(data=section.data, demonstrations=section.demonstrations, validation=0)
        remedy = "shorten them or leave them out of distillation.data"
        data = sft_data(self.run.bench, source, seed=self.run.recipe.run.seed, remedy=remedy)
        self.run.folder.log_data(self.name, data.facts())
        self.run.display.note(f"{self.name}: {data.text}")
        return data.train

    def _batch(self, conversations: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The next batch; every conversation once an epoch, in an order that the epoch fixes."""
        size = min(self.section.batch_size, len(conversations))
        chosen = []
        for place in range(self.progress.taken * size, (self.progress.taken + 1) * size):
            epoch, at = divmod(place, len(conversations))
            chosen.append(shuffled(conversations, f"{self.seed}/{epoch}")[at])
        return chosen

    def _out_of_time(self) -> bool:
        minutes = self.section.max_minutes
        return minutes is not None and self.progress.seconds > minutes * 60

    def state(self) -> dict[str, Any]:
        return {**asdict(self.progress), "sampler": self.sampler.state() if self.sampler else None}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.progress = DistillationState(**{k: v for k, v in state.items() if k != "sampler"})
        if self.sampler is not None:
            self.sampler.load(state["sampler"])
        self.load_optimizer(tensors, self.run.bench.policy.model, self.section.max_grad_norm)


def of_groups(groups: Sequence[Group]) -> list[TrainingSample]:
    """What was sampled, but for episodes that failed; the teacher needs no reward."""
    whole = [t for g in groups for t in g.trajectories if t.failure is None]
    return [s for t in whole for s in t.samples if s.num_trained]
