"""The first answers of a preference rung: green is pushed up, red is pushed down."""

from __future__ import annotations

from pathlib import Path

from stepladder.data.files.records import Unpaired
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.rungs.coloured import shown
from stepladder.rungs.preference.data import judged_data, pair_data, preference_rows
from stepladder.rungs.preview import Preview
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench


def first_answers(bench: Workbench, settings: PreferenceSection, samples: int) -> Preview | None:
    """Return the first answers; None where an earlier rung is still to write them."""
    if settings.data == EARLIER_RUNG:
        return None
    notes: list[str] = []
    seed = bench.recipe.run.seed
    rows, held = preference_rows(bench, settings, Path(), seed=seed, say=notes.append)
    answers: list[tuple[str, float, TrainingSample]] = []
    if settings.loss == "kto":
        judged, tally = judged_data(bench, rows, held, settings, seed=seed)
        for one in judged.train:
            name, sign = ("good", 1.0) if one.desirable else ("bad", -1.0)
            answers.append((name, sign, one.answer.sample))
    else:
        pairs, tally = pair_data(bench, rows, held, settings)
        for pair in pairs.train:
            answers += [("chosen", 1.0, pair.chosen.sample), ("rejected", -1.0, pair.rejected.sample)]
    first = []
    for name, sign, sample in answers[:samples]:
        row = rows[int(sample.group_id.rpartition("-")[2])]
        said = row.completion if isinstance(row, Unpaired) else row.chosen if sign > 0 else row.rejected
        first.append(shown(bench.renderer, sample, f"{sample.group_id} {name}", sign, (*row.prompt, *said)))
    headline = f"preference ({settings.loss}): {tally.text}; {len(held)} held out"
    return Preview(headline, ["; ".join(notes)] if notes else [], first)
