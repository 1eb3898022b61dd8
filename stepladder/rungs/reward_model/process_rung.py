"""A process reward model on labelled steps: the best epoch's weights, calibrated and saved."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.text import Text

from stepladder.data.encoder import Encoder
from stepladder.data.samples import StepSample
from stepladder.environments.checked import CheckedWorld
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.reward_folder import RewardInfo
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.process_reward_model import ProcessRewardModelSection
from stepladder.rungs.epochs import Metrics
from stepladder.rungs.preview import Preview, Shown
from stepladder.rungs.reward_model.process_update import step_update, step_validation
from stepladder.rungs.reward_model.scoring import ScoringRung
from stepladder.rungs.reward_model.step_data import check_rows, step_data
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources


class ProcessRewardModelRung(ScoringRung):
    """Trains on the ends of steps; leaves `process_reward_model/` in the run folder."""

    name: ClassVar[str] = "process_reward_model"

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        check_rows(recipe, cls.section_of(recipe), world, sources)

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview | None:
        """Return the first solutions, unless they are still to be played.

        Each step ends at an underlined token, green where its label is above a half.
        """
        settings: ProcessRewardModelSection = cls.section_of(bench.recipe)
        if settings.monte_carlo is not None:
            return None
        notes: list[str] = []
        train, held = step_data(
            bench,
            settings,
            Path(),
            seed=bench.recipe.run.seed,
            report=lambda text, _: notes.append(text),
        )
        first = [
            Shown(row.sample.group_id, f"{len(row.ends)} steps", steps_in_colours(bench.renderer, row))
            for row in train[:samples]
        ]
        headline = f"{cls.name}: {len(train)} solutions to train on, {len(held)} held out"
        return Preview(headline, notes, first)

    @property
    def settings(self) -> ProcessRewardModelSection:
        settings: ProcessRewardModelSection = self.section_of(self.run.recipe)
        return settings

    def climb(self) -> None:
        run, s = self.run, self.settings
        train, held = step_data(run.bench, s, run.folder.path, seed=run.recipe.run.seed, report=self.report)

        def update(
            model: ScoredModel, optimizer: MasterOptimizer, rows: list[StepSample], rate: float
        ) -> Metrics:
            return run.bench.memory.fit(
                [row.sample for row in rows],
                s.token_budget,
                optimizer,
                lambda tokens: step_update(model, optimizer, rows, learning_rate=rate, token_budget=tokens),
            )

        def validate(model: ScoredModel, rows: list[StepSample]) -> Metrics:
            return step_validation(model, rows, token_budget=s.token_budget)[0]

        model = self.fit(train, held, update, validate)
        metrics, table = step_validation(model, held, token_budget=s.token_budget) if held else ({}, ())
        stops = tuple(run.bench.renderer.stop_token_ids)
        info = RewardInfo(
            "process",
            stop_token_ids=stops,
            separator=s.separator,
            held_out=metrics,
            reliability=table,
        )
        self.export(model, info)


def steps_in_colours(renderer: Encoder, row: StepSample) -> Text:
    """Return a solution whose steps are green or red by their labels, after the dim prompt."""
    text, at = Text(), 0
    for end, label in zip(row.ends, row.labels, strict=True):
        colour = "green" if label > 0.5 else "red"
        text.append(renderer.decode(row.sample.token_ids[at:end]), colour if at else "dim")
        text.append(renderer.decode(row.sample.token_ids[end : end + 1]), f"{colour} underline")
        at = end + 1
    text.append(renderer.decode(row.sample.token_ids[at:]), "dim")
    return text
