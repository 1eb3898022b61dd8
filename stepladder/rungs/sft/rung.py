"""The rung of supervised fine-tuning: on a file, or on demonstrations of the environment."""

from __future__ import annotations

import math
from typing import ClassVar

from stepladder.data.files.records import Demonstration
from stepladder.environments.checked import CheckedWorld
from stepladder.planning.needs import Needs
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.sft import SftSection
from stepladder.rungs.coloured import shown
from stepladder.rungs.demonstrations import sft_data
from stepladder.rungs.fitting import FittingRung
from stepladder.rungs.preview import Preview
from stepladder.rungs.sft_rows import check_rows
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources


class SftRung(FittingRung):
    """Supervised fine-tuning on a file or on demonstrations of the environment."""

    name: ClassVar[str] = "sft"

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        check_rows(recipe, world, cls.section_of(recipe), sources)

    @classmethod
    def needs(cls, section: SftSection) -> Needs:
        made = section.demonstrations  # those held out are made in addition
        return Needs(
            rows=section.batch_size,
            token_budget=section.token_budget,
            steps=section.epochs * math.ceil(made / section.batch_size) if made else None,
            longest=section.max_tokens,
            keeps_best=bool(section.validation),
        )

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview:
        data = sft_data(bench, cls.section_of(bench.recipe), seed=bench.recipe.run.seed)
        first = []
        for sample in data.train[:samples]:
            row = data.rows.train[int(sample.trajectory_id.removeprefix("demo-"))]
            messages = row.messages if isinstance(row, Demonstration) else ()
            first.append(shown(bench.renderer, sample, sample.trajectory_id, 1.0, messages))
        headline = f"{cls.name}: {len(data.train)} samples to train on, {len(data.held)} held out"
        return Preview(headline, [data.text], first)

    def climb(self) -> None:
        run = self.run
        settings: SftSection = self.section_of(run.recipe)
        data = sft_data(run.bench, settings, seed=run.recipe.run.seed)
        run.folder.log_data(self.name, data.facts())
        run.display.note(f"{self.name}: {data.text}")
        self.fit(data.train, data.held, run.recipe.run.seed)
