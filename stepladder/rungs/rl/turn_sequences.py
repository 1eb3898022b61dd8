"""Each turn as a sequence by itself: what `Algorithm.sequence` = "turn" makes of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepladder.rungs.rl.update import RlBatch
from stepladder.types import TrainingSample


def by_turns(batch: RlBatch) -> RlBatch:
    """Return the batch with a row for each turn of its trajectories, to be called before any update.

    Ratios, lengths and denominators are then those of turns. The rows of a sample have the same ids, of which
    each trains its own turn; what they share is computed once, for they stay together in a micro-batch.
    """
    rows: list[int] = []
    samples: list[TrainingSample] = []
    for row, sample in enumerate(batch.samples):
        trained = {turn for turn, mask in zip(sample.turn_ids, sample.mask, strict=True) if mask}
        for turn in sorted(trained):
            own = tuple(m and t == turn for m, t in zip(sample.mask, sample.turn_ids, strict=True))
            samples.append(replace(sample, mask=own))
            rows.append(row)
    kept = torch.tensor(rows, dtype=torch.long)
    return replace(
        batch,
        samples=samples,
        advantages=batch.advantages[kept],
        trajectory_index=torch.arange(len(rows)),
        group_index=batch.group_index[kept],
        values=None if batch.values is None else batch.values[kept],
        returns=None if batch.returns is None else batch.returns[kept],
    )
