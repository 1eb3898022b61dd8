"""The key/value cache of the rows that are decoding: one preallocated tensor, a slot per row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET = 32  # attention reads, and the cache grows, in steps of at least this many positions


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's cache. Every layer has the same shape, or the model takes the plain path."""

    layers: int
    kv_heads: int
    head_dim: int


def bucketed(length: int) -> int:
    """`length` rounded up to a whole bucket; buckets grow with it, so that at most an eighth is unused."""
    step = max(BUCKET, 1 << max(0, length // 8).bit_length() - 1) if length >= 8 else BUCKET
    return -(-length // step) * step


class SlotCache:
    """`kv` is [layers, 2, rows, kv_heads, T, head_dim]; keys at index 0, values at 1.

    Live rows fill the slots 0 .. n-1, so that a step reads views, never gathers. What lies beyond a row's
    own length is finite (zeros or an old row) and masked by whoever reads it. T is kept `tight`: oneDNN's
    batched products copy operands that are not dense, which a slice of a longer T would be. Where recorded
    graphs point into the cache it is not: then it moves as rarely as can be.
    """

    tight = True

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry = geometry
        self._buffer = torch.zeros(0, dtype=dtype, device=device)
        self._asked = self._expected = 0  # numbers since it was freed, and of the time before
        self.kv = self._view(0, 0)

    def _view(self, rows: int, length: int) -> Tensor:
        g = self.geometry
        shape = (g.layers, 2, rows, g.kv_heads, length, g.head_dim)
        return self._buffer[: math.prod(shape)].view(shape)

    @property
    def rows(self) -> int:
        return self.kv.shape[2]

    @property
    def length(self) -> int:
        return self.kv.shape[4]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` slots of `length` positions; what these slots hold is kept."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows = self.rows if rows <= self.rows else max(rows, self.rows * 3 // 2, 4)
        new_length = max(self.length, bucketed(length))
        if not self.tight and length > self.length:
            new_length = max(new_length, bucketed(self.length * 3 // 2))
        old, g = self.kv, self.geometry
        size = g.layers * 2 * new_rows * g.kv_heads * new_length * g.head_dim
        self._asked = max(self._asked, size)
        if size > self._buffer.numel():
            size = max(size, self._expected)  # made once, it need not grow
            self._buffer = torch.zeros(size, dtype=old.dtype, device=old.device)
        self.kv = self._view(new_rows, new_length)
        kept, length = min(rows, old.shape[2]), old.shape[4]
        if kept and length:
            # In the same memory a layer moves towards the end, over places of layers that have moved before.
            for layer in reversed(range(g.layers)):
                self.kv[layer, :, :kept, :, :length] = old[layer, :, :kept].clone()

    def clear(self) -> None:
        """No row is live: the next `reserve` may lay the same memory out anew."""
        if self.tight:
            self.kv = self._view(0, 0)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of positions start .. end-1: [layers, 2, kv_heads, end - start, head_dim]."""
        return self.kv[:, :, slot, :, start:end].clone()

    def write(self, slot: int, start: int, piece: Tensor) -> None:
        """Put a piece that `read` gave back at position `start`."""
        self.kv[:, :, slot, :, start : start + piece.shape[3]] = piece

    def free(self) -> None:
        """Give the memory back."""
        self._expected, self._asked = self._asked, 0
        self._buffer = self._buffer.new_zeros(0)
        self.kv = self._view(0, 0)
