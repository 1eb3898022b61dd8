"""What the rungs of reward models have in common: a copy of the policy with a head, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from stepladder.errors import DataError
from stepladder.planning.needs import Needs, both_sides_limit
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer, warmup_then_constant
from stepladder.policies.reward_folder import RewardInfo, save_scored
from stepladder.policies.tensors import room_for
from stepladder.recipe.scoring import ScoringSection
from stepladder.rungs.base import POLICY, Rung, load_policy, policy_tensors
from stepladder.rungs.epochs import MASTER, EpochState, Metrics, none_better, run_epochs, shuffled_batches
from stepladder.rungs.run import Run

Row = TypeVar("Row")
Update = Callable[[ScoredModel, MasterOptimizer, list[Row], float], Metrics]
Validate = Callable[[ScoredModel, list[Row]], Metrics]


class ScoringRung(Rung):
    """Trains a head on a copy of the policy as it is when the rung begins; the policy stays as it is.

    Subclasses give `settings` and `climb`, which calls `fit` and `export`.
    """

    @classmethod
    def needs(cls, section: Any) -> Needs:
        return Needs(
            rows=section.batch_size,
            token_budget=section.token_budget,
            longest=both_sides_limit(section.max_prompt_tokens, section.max_completion_tokens),
            keeps_best=bool(section.validation),
            scores=True,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = EpochState()
        self.model: ScoredModel | None = None

    @property
    def settings(self) -> ScoringSection:
        raise NotImplementedError

    @property
    def step(self) -> int:
        return self.progress.step

    def scored(self) -> ScoredModel:
        """The copy with its head, made when first asked for."""
        if self.model is None:
            own: ScoredModel = ScoredModel.own_trunk(self.run.bench.policy)
            self.model = own
        return self.model

    def report(self, text: str, fingerprint: str) -> None:
        """What became of the rows: said, and noted; a resumed run must have the same."""
        self.run.display.note(f"{self.name}: {text}")
        self.run.folder.log_data(self.name, {"text": text, "fingerprint": fingerprint})

    def fit(
        self, train: list[Row], held: list[Row], update: Update[Row], validate: Validate[Row]
    ) -> ScoredModel:
        """Run the epochs from where the state stands; the model then has its best weights."""
        if not train:
            raise DataError("there is nothing to train on: no row is left; give more, or lower validation")
        run, settings, seed = self.run, self.settings, self.run.recipe.run.seed
        model, size = self.scored(), settings.batch_size

        def one(rows: list[int], step: int) -> Metrics:
            rate = warmup_then_constant(step, peak=settings.learning_rate, warmup=settings.warmup_steps)
            metrics = update(model, optimizer, [train[i] for i in rows], rate)
            return {**metrics, "learning_rate": rate}

        with self.training(model, settings.max_grad_norm) as optimizer:
            run.display.start(self.name, settings.epochs * math.ceil(len(train) / size), self.step)
            run_epochs(
                optimizer,
                settings,
                self.progress,
                batches=lambda epoch: shuffled_batches(len(train), size, f"{seed}/{self.name}/{epoch}"),
                update=one,
                validate=(lambda: validate(model, held)) if held else None,
                on_step=lambda step, metrics: run.log(self.name, step, metrics),
                on_epoch=lambda state: run.save_if_due(),
            )
            self.progress.best = {}
        if said := none_better(self.progress):
            run.display.note(f"{self.name}: {said}")
        return model

    def export(self, model: ScoredModel, info: RewardInfo) -> Path:
        """Write the model to the run folder, in a folder of the rung's name."""
        self.run.display.status(f"saving {self.name}")
        folder: Path = self.run.folder.path
        with room_for("the reward model", folder):
            return save_scored(model, folder / self.name, info)

    def state(self) -> dict[str, Any]:
        return self.progress.checkpoint()

    def tensors(self) -> dict[str, Tensor]:
        """The policy (an earlier rung may have trained it), then the copy's masters and moments."""
        tensors = {**policy_tensors(self.run.bench.policy.model), **self.progress.tensors()}
        if self.optimizer is not None:
            tensors |= self.optimizer.tensors()
        elif self.model is not None:  # trained, not yet exported
            tensors |= {f"{MASTER}{name}": p.detach() for name, p in self.model.trainable().items()}
        return tensors

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        policy = {name: t for name, t in tensors.items() if name.startswith(POLICY)}
        load_policy(self.run.bench.policy.model, policy)
        self.progress = EpochState.of(state, tensors)
        if any(name.startswith(MASTER) for name in tensors):  # taken after training began
            model = self.scored()
            self.optimizer = MasterOptimizer(model.trainable(), max_grad_norm=self.settings.max_grad_norm)
            self.optimizer.load(dict(tensors))
