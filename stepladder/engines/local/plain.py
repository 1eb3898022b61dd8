"""The last resort: one cache per sequence, made and used by the model itself, batch size 1.

For models whose state is no plain key/value cache (linear attention, state spaces, layers of unequal
shape). Nothing is shared or kept between turns: right, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepladder.engines.local.forward import cache_argument, evaluating


class PlainForward:
    """Every slot holds the cache object that the model returned."""

    shares = False
    ragged = True  # one row after the other

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cache_name = cache_argument(model)
        self._modules = list(model.modules())
        self._caches: dict[int, Any] = {}

    def reserve(self, rows: int, length: int) -> None:
        """The model's caches grow by themselves."""

    def move(self, source: int, target: int, length: int) -> None:
        self._caches[target] = self._caches.pop(source)

    def drop(self, slot: int) -> None:
        self._caches.pop(slot, None)

    def clear(self) -> None:
        self._caches.clear()

    def rest(self) -> None:
        self._caches.clear()

    def free(self) -> None:
        self._caches.clear()

    def run(
        self, new: Sequence[Sequence[int]], starts: Sequence[int], slot: int, *, every: bool = False
    ) -> Tensor:
        rows = [
            self._row(list(tokens), starts[i], slot + i)[slice(None) if every else slice(-1, None)]
            for i, tokens in enumerate(new)
        ]
        return torch.cat(rows)

    def _row(self, tokens: list[int], start: int, slot: int) -> Tensor:
        if start == 0:
            self._caches.pop(slot, None)
        device = next(self.model.parameters()).device
        kwargs: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=device), "use_cache": True}
        if start:
            kwargs[self._cache_name] = self._caches[slot]
        with evaluating(self._modules):
            out = self.model(**kwargs)
        for name in (self._cache_name, "past_key_values", "cache_params"):
            if getattr(out, name, None) is not None:
                self._caches[slot] = getattr(out, name)
                break
        logits: Tensor = out.logits[0]
        return logits
