"""One forward pass over a slice of the cache's slots, through the model's own modules.

The layout of a batch (which slots, which positions) travels with the call, in a cache object, a mask and
position ids; nothing global is set, and the model's configuration is never touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from stepladder.engines.local.cache import SlotCache, bucketed


class Forward(Protocol):
    """What the scheduler decodes with."""

    shares: bool  # keys and values of a prefix may be copied between rows, and kept
    ragged: bool  # rows of unequal length cost no padding

    def run(
        self, new: Sequence[Sequence[int]], starts: Sequence[int], slot: int, *, every: bool = False
    ) -> Tensor:
        """Append the tokens new[i] to slot + i, whose row holds `starts[i]` positions so far.

        The caller has reserved the room. Returns logits [rows, V] after each row's last token or, for
        `every`, [tokens, V] after each token of the rows in their order.
        """
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row of `length` positions to another slot."""
        ...

    def reserve(self, rows: int, length: int) -> None:
        """Make room; only the first `rows` slots are sure to keep what they hold."""
        ...

    def drop(self, slot: int) -> None:
        """The row in `slot` is gone."""
        ...

    def clear(self) -> None:
        """No row is live."""
        ...

    def rest(self) -> None:
        """No row is live for a while: give the memory of the caches back, where it is cheap to have again."""
        ...

    def free(self) -> None:
        """The end: give all memory back."""
        ...


class LayoutCache(Cache):
    """A transformers cache that writes to given slots and positions, and shows the first T of them."""

    def __init__(self, store: SlotCache, slot: int, positions: Tensor, read: int) -> None:
        super().__init__(layers=[])
        self.store, self.read, self.positions = store, read, positions
        self.slots = slice(slot, slot + positions.shape[0])
        self.rows = torch.arange(slot, slot + positions.shape[0], device=positions.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Write [b, kv_heads, q, d]; return keys and values [b, kv_heads, T, d]."""
        kv = self.store.kv[layer_idx]
        kv[0][self.rows, :, self.positions] = key_states.transpose(1, 2)
        kv[1][self.rows, :, self.positions] = value_states.transpose(1, 2)
        return kv[0, self.slots, :, : self.read], kv[1, self.slots, :, : self.read]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are passed explicitly; models that ask want to know whether the cache is empty."""
        return int(self.positions.min())


class ModelForward:
    """The default path: any causal LM whose layers all attend (fully or within a sliding window)."""

    shares = True
    ragged = False

    def __init__(self, model: Any, store: SlotCache, max_context: int, pad_token_id: int) -> None:
        self.model, self.store, self.max_context, self.pad = model, store, max_context, pad_token_id
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)
        self._modules = list(model.modules())
        self._windows = windows(model.config)
        self._mask_dtype = next(model.parameters()).dtype

    def reserve(self, rows: int, length: int) -> None:
        self.store.reserve(rows, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.store.copy(source, target, length)

    def drop(self, slot: int) -> None:
        """A slot is reused as it is."""

    def clear(self) -> None:
        self.store.clear()

    def rest(self) -> None:
        self.store.free()

    def free(self) -> None:
        self.store.free()

    def run(
        self, new: Sequence[Sequence[int]], starts: Sequence[int], slot: int, *, every: bool = False
    ) -> Tensor:
        device = self.store.kv.device
        width = max(map(len, new))
        ids = torch.tensor([[*tokens, *[self.pad] * (width - len(tokens))] for tokens in new], device=device)
        start = torch.tensor(starts, device=device)
        positions = start[:, None] + torch.arange(width, device=device)
        self.store.reserve(slot + len(new), max(starts) + width)  # padding is written too
        read = min(bucketed(max(starts) + width), self.store.length)
        kwargs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": self._masks(positions, read),
            "position_ids": positions.clamp(max=self.max_context - 1),
            "use_cache": True,
            self._cache_name: LayoutCache(self.store, slot, positions, read),
        }
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=device)
        columns, where = torch.unique(last, return_inverse=True)
        keep = not every and "logits_to_keep" in self._parameters
        if keep:
            kwargs["logits_to_keep"] = columns
        with evaluating(self._modules):
            logits: Tensor = self.model(**kwargs).logits
        if every:
            return torch.cat([logits[i, : len(tokens)] for i, tokens in enumerate(new)])
        return logits[torch.arange(len(new), device=device), where if keep else last]

    def _masks(self, positions: Tensor, read: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [b, 1, q, T]: one, or one per layer type."""
        made = {kind: self._mask(positions, read, window) for kind, window in self._windows.items()}
        return next(iter(made.values())) if len(made) == 1 else made

    def _mask(self, positions: Tensor, read: int, window: int | None) -> Tensor:
        keys = torch.arange(read, device=positions.device)
        seen = keys <= positions[:, :, None]
        if window is not None:
            seen &= keys > positions[:, :, None] - window
        mask = torch.zeros(seen.shape, dtype=self._mask_dtype, device=positions.device)
        return mask.masked_fill_(~seen, torch.finfo(self._mask_dtype).min)[:, None]


def cache_argument(model: Any) -> str:
    """The name under which the model takes a cache: renamed from `past_key_values` in transformers 5.x."""
    names = inspect.signature(model.forward).parameters
    known = [name for name in ("cache", "past_key_values", "cache_params") if name in names]
    return known[0] if known else "past_key_values"


def windows(config: Any) -> dict[str, int | None]:
    """Layer type -> sliding window (None: everything before). One entry where all layers are alike."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        used = window is not None and getattr(config, "use_sliding_window", True)
        return {"sliding_attention" if used else "full_attention": window if used else None}
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Dropout and activation checkpointing off for one call; the training flags are put back after."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
