"""What supervised fine-tuning learns from: rows of a file, or conversations that the environment makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepladder.data.budget import Dropped, Fitted, Tally, limit_tokens
from stepladder.data.files.records import Demonstration, Text
from stepladder.data.samples import text_samples
from stepladder.errors import DataError
from stepladder.recipe.sft import SftSection
from stepladder.rungs.long_rows import refuse_overlong
from stepladder.rungs.row_errors import naming
from stepladder.rungs.sft_rows import Row, SftRows, file_rows, made_conversations
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench

REMEDY = (
    'leave them out with sft.max_tokens = {limit}, or cut them with that and sft.overlong = "cut" (texts '
    "are split)"
)


@dataclass(frozen=True, slots=True)
class SftData:
    """The samples of the rows; those of training row i have the trajectory id demo-i."""

    rows: SftRows
    train: list[TrainingSample]
    held: list[TrainingSample]
    tally: Tally

    @property
    def text(self) -> str:
        """One line: where the rows are from, and what became of them."""
        return f"{self.rows.description}; {self.tally.text}"

    def facts(self) -> dict[str, Any]:
        """For the run folder."""
        return {"text": self.text, "fingerprint": self.rows.fingerprint}


def sft_data(bench: Workbench, settings: SftSection, *, seed: int, remedy: str = REMEDY) -> SftData:
    """The samples of SFT. Raises `DataError` when `sft.max_tokens` leaves nothing on either side, and for
    rows longer than the model has positions for, of which `remedy` says what to do."""
    if settings.data is not None:
        rows = bench.sources.once(file_rows, settings, seed)
    else:
        rows = _made(bench, settings, seed)
    tally = Tally()
    train = _rendered(bench, settings, rows.train, "demo", tally)
    held = _rendered(bench, settings, rows.held, "held", tally)
    if not train or (rows.held and not held):
        side = "validate on" if train else "train on"
        raise DataError(
            f"nothing is left to {side}: {tally.text}; raise sft.max_tokens={settings.max_tokens}"
        )
    refuse_overlong(bench.policy, ((sample,) for sample in (*train, *held)), remedy)
    return SftData(rows, train, held, tally)


def _made(bench: Workbench, settings: SftSection, seed: int) -> SftRows:
    tools = bench.runner.run(bench.world.opening()).tools
    train, held, said = bench.sources.once(made_conversations, bench.world, settings, seed)
    rows = [[Demonstration(tuple(c), tools) for c in part] for part in (train, held)]
    return SftRows([*rows[0]], [*rows[1]], said)


def _rendered(
    bench: Workbench, settings: SftSection, rows: Sequence[Row], name: str, tally: Tally
) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    for i, row in enumerate(rows):
        fitted = _row_samples(bench, settings, row, f"{name}-{i}", tally)
        if isinstance(fitted, Dropped):
            tally.drop(fitted)
        else:
            samples += fitted
    return samples


def _row_samples(
    bench: Workbench, settings: SftSection, row: Row, key: str, tally: Tally
) -> Sequence[TrainingSample] | Dropped:
    limit = settings.max_tokens
    if isinstance(row, Text):
        whole = text_samples(bench.renderer, row.text, trajectory_id=key, group_id=key)
        if limit is None or len(whole[0].token_ids) <= limit:
            tally.kept += 1
            return whole
        if settings.overlong == "drop":
            return Dropped(f"over max_tokens={limit}", key, len(whole[0].token_ids))
        return text_samples(
            bench.renderer, row.text, trajectory_id=key, group_id=key, max_tokens=limit, tally=tally
        )
    with naming(row.messages):
        samples = bench.renderer.demonstration(
            row.messages,
            row.tools,
            trajectory_id=key,
            group_id=key,
            train=settings.train,
            answers_from=row.answers_from,
        )
    fitted = [Fitted(sample) for sample in samples]
    if limit is not None:
        cut = limit_tokens(samples, limit, settings.overlong)
        if isinstance(cut, Dropped):
            return cut
        fitted = cut
    tally.keep(fitted, left_out=len(samples) - len(fitted))
    return [f.sample for f in fitted]
