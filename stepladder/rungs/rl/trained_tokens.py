"""The trained tokens of a batch by trajectory: one row each, however many samples it was split into.

Credit runs along the tokens that the policy sampled. What stands between them (prompts, tool output, a
history that a template rewrote) has no part in it, so it is left out: column k is the k-th trained token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepladder.types import TrainingSample


class TokenTable:
    """Where each trained token stands: (sample row, column) in the batch, (trajectory, place) here.

    mask [N, K] bool: True where trajectory i has a k-th trained token. turns [N, K]: the turn that sampled
    it, counted within its trajectory from 0, -1 elsewhere. counts [N]: trained tokens.

    >>> s = TrainingSample((5, 6, 2), (False, True, True), (0.0, 0.0, 0.0), "t", (-1, 0, 1), "g")
    >>> TokenTable([s], torch.tensor([0]), 1).turns.tolist()
    [[0, 1]]
    """

    def __init__(self, samples: Sequence[TrainingSample], owner: Tensor, trajectories: int) -> None:
        filled = [0] * trajectories
        rows: list[int] = []
        columns: list[int] = []
        owners: list[int] = []
        places: list[int] = []
        turns: list[int] = []
        for row, (sample, i) in enumerate(zip(samples, owner.tolist(), strict=True)):
            at = [t for t, trained in enumerate(sample.mask) if trained]
            rows += [row] * len(at)
            columns += at
            owners += [i] * len(at)
            places += range(filled[i], filled[i] + len(at))
            turns += [sample.turn_ids[t] for t in at]
            filled[i] += len(at)
        self._from = torch.tensor(rows, dtype=torch.long), torch.tensor(columns, dtype=torch.long)
        self._to = torch.tensor(owners, dtype=torch.long), torch.tensor(places, dtype=torch.long)
        self.counts = torch.tensor(filled, dtype=torch.long)
        width = max([len(s.token_ids) for s in samples], default=0)
        self._padded = (len(samples), width)
        self.mask = torch.arange(max(filled, default=0)).expand(trajectories, -1) < self.counts[:, None]
        self.turns = torch.full(self.mask.shape, -1, dtype=torch.long)
        self.turns[self._to] = torch.tensor(turns, dtype=torch.long)

    def gather(self, padded: Tensor) -> Tensor:
        """[n, T] in the layout of the samples to [N, K]; 0 where there is no token."""
        out = torch.zeros(self.mask.shape, dtype=padded.dtype)
        out[self._to] = padded.cpu()[self._from]
        return out

    def scatter(self, compact: Tensor) -> Tensor:
        """[N, K] to [n, T] in the layout of the samples; 0 outside the mask."""
        out = torch.zeros(self._padded, dtype=compact.dtype)
        out[self._from] = compact[self._to]
        return out

    def last(self) -> Tensor:
        """[N, K], True at the last trained token of each trajectory."""
        return self.mask & (torch.arange(self.mask.shape[1]) == self.counts[:, None] - 1)

    def turn_ends(self) -> Tensor:
        """[N, K], True at the last trained token of each turn."""
        following = torch.full_like(self.turns, -1)
        following[:, :-1] = self.turns[:, 1:]
        return self.mask & (self.turns != following)
