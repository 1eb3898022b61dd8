"""The key/value cache of the rows that are decoding: one preallocated tensor, a slot per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET = 32  # attention reads, and memory grows, in steps of this many positions


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model's cache. Every layer has the same shape, or the model takes the plain path."""

    layers: int
    kv_heads: int
    head_dim: int


def bucketed(length: int) -> int:
    """`length` rounded up to a whole bucket."""
    return -(-length // BUCKET) * BUCKET


class SlotCache:
    """`kv` is [layers, 2, rows, kv_heads, T, head_dim]; keys at index 0, values at 1.

    Live rows fill the slots 0 .. n-1, so that a step reads views, never gathers. What lies beyond a row's
    own length is finite (zeros or an old row) and masked by whoever reads it.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry = geometry
        self.kv = self._zeros(0, 0, dtype, device)

    def _zeros(self, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        g = self.geometry
        return torch.zeros(g.layers, 2, rows, g.kv_heads, length, g.head_dim, dtype=dtype, device=device)

    @property
    def rows(self) -> int:
        return self.kv.shape[2]

    @property
    def length(self) -> int:
        return self.kv.shape[4]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` slots of `length` positions; grows by half at least, keeps what is there."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows = self.rows if rows <= self.rows else max(rows, self.rows * 3 // 2, 4)
        new_length = self.length if length <= self.length else bucketed(max(length, self.length * 3 // 2))
        old = self.kv
        self.kv = self._zeros(new_rows, new_length, old.dtype, old.device)
        if old.numel():
            self.kv[:, :, : old.shape[2], :, : old.shape[4]] = old

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
        self.kv = self._zeros(0, 0, self.kv.dtype, self.kv.device)
