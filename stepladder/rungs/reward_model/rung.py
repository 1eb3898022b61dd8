"""A reward model on pairs or rankings (Bradley-Terry): the best epoch's weights, calibrated and saved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text

from stepladder.environments.checked import CheckedWorld
from stepladder.planning.needs import Needs
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.reward_folder import RewardInfo
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.reward_model import RewardModelSection
from stepladder.rungs.epochs import Metrics
from stepladder.rungs.preview import Preview, Shown
from stepladder.rungs.reward_model.ranking_data import check_rows, ranked_data
from stepladder.rungs.reward_model.ranking_update import (
    Ranked,
    ranking_update,
    ranking_validation,
    score_statistics,
)
from stepladder.rungs.reward_model.scoring import ScoringRung
from stepladder.workbench.bench import Workbench
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

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview:
        """Return the first answers, the best of each prompt first; the score is read at the last token."""
        notes: list[str] = []
        settings, seed = cls.section_of(bench.recipe), bench.recipe.run.seed
        train, held = ranked_data(bench, settings, seed=seed, report=lambda text, _: notes.append(text))
        answers = [(row, k, sample) for row in train for k, sample in enumerate(row.samples)]
        first = []
        for row, k, sample in answers[:samples]:
            beaten = sum(k == better for better in row.better)
            style = "green" if beaten else "red"
            text = Text(bench.renderer.decode(sample.token_ids[:-1]), style)
            text.append(bench.renderer.decode(sample.token_ids[-1:]), f"{style} underline")
            first.append(Shown(sample.group_id, f"better than {beaten} of {len(row.samples) - 1}", text))
        headline = f"{cls.name}: {len(train)} rows to train on, {len(held)} held out"
        return Preview(headline, notes, first)

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
