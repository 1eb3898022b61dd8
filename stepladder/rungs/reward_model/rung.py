"""A reward model on pairs or rankings (Bradley-Terry): the best epoch's weights, calibrated and saved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from stepladder.environments.checked import CheckedWorld
from stepladder.planning.needs import Needs
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.reward_folder import RewardInfo
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.rungs.epochs import Metrics
from stepladder.rungs.reward_model.ranking_data import check_rows, ranked_data
from stepladder.rungs.reward_model.ranking_update import (
    Ranked,
    ranking_update,
    ranking_validation,
    score_statistics,
)
from stepladder.rungs.reward_model.scoring import ScoringRung
from stepladder.workbench.sources import Sources


class RewardModelRung(ScoringRung):
    """Trains on ranked answers; leaves `reward_model/` in the run folder."""

    name: ClassVar[str] = "reward_model"

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        check_rows(recipe, cls.section_of(recipe), world, sources)

    @classmethod
    def needs(cls, section: Any) -> Needs:
        made = max(1, section.pairs - section.validation) if section.pairs else 0
        steps = section.epochs * math.ceil(made / section.batch_size) if made else None
        return replace(super().needs(section), answers=2, steps=steps)

    @property
    def settings(self) -> RewardModelSection:
        settings: RewardModelSection = self.section_of(self.run.recipe)
        return settings

    def climb(self) -> None:
        bench, s = self.run.bench, self.settings
        train, held = ranked_data(bench, s, seed=self.run.recipe.run.seed, report=self.report)

        def update(
            model: ScoredModel, optimizer: MasterOptimizer, rows: list[Ranked], rate: float
        ) -> Metrics:
            return bench.memory.fit(
                [sample for row in rows for sample in row.samples],
                s.token_budget,
                optimizer,
                lambda tokens: ranking_update(
                    model, optimizer, rows, centring=s.centring, learning_rate=rate, token_budget=tokens
                ),
            )

        def validate(model: ScoredModel, rows: list[Ranked]) -> Metrics:
            return ranking_validation(model, rows, centring=s.centring, token_budget=s.token_budget)[0]

        model = self.fit(train, held, update, validate)
        mean, std = score_statistics(model, train, token_budget=s.token_budget)
        metrics, table = (
            ranking_validation(model, held, centring=s.centring, token_budget=s.token_budget)
            if held
            else ({}, ())
        )
        stops = tuple(bench.renderer.stop_token_ids)
        info = RewardInfo("outcome", mean, std, stops, held_out=metrics, reliability=table)
        self.export(model, info)
