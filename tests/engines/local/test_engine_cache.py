"""The slot cache keeps what it holds while it grows, and stays tight."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.engines.local.cache import Geometry, SlotCache, bucketed


@given(st.integers(1, 100_000))
def test_buckets_waste_little(length: int) -> None:
    bucket = bucketed(length)
    assert bucket >= length
    assert bucket - length < max(32, length / 8 + 1)
    assert bucket % 32 == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=6))
def test_growth_keeps_what_the_rows_asked_for_hold(requests: list[tuple[int, int]]) -> None:
    cache = SlotCache(Geometry(2, 3, 4), torch.float32, torch.device("cpu"))
    for _ in range(2):  # the second round reuses the memory of the first
        cache.clear()
        written: dict[int, torch.Tensor] = {}
        for i, (rows, length) in enumerate(requests):
            cache.reserve(rows, length)
            assert cache.rows >= rows
            assert cache.length >= length
            written = {slot: held for slot, held in written.items() if slot < rows}
            piece = torch.randn(2, 2, 3, length, 4, generator=torch.Generator().manual_seed(i))
            cache.write(rows - 1, 0, piece)
            written[rows - 1] = piece
            for slot, expected in written.items():
                assert torch.equal(cache.read(slot, 0, expected.shape[3]), expected)
        assert cache.length <= bucketed(max(length for _, length in requests))
        assert cache.kv[1, 0].is_contiguous()
    source = next(iter(written))
    cache.copy(source, 0, written[source].shape[3])
    assert torch.equal(cache.read(0, 0, written[source].shape[3]), written[source])
    cache.free()
    assert cache.kv.numel() == 0


def test_memory_given_back_comes_again_in_one_piece() -> None:
    """And only as much as was asked for since the time before, however large it once was."""
    cache = SlotCache(Geometry(2, 3, 4), torch.float32, torch.device("cpu"))
    cache.reserve(2, 640)
    cache.reserve(8, 64)
    largest = cache.kv.numel()
    cache.free()
    assert cache.kv.numel() == 0
    cache.reserve(1, 32)
    assert cache._buffer.numel() == largest
    cache.free()
    cache.reserve(1, 32)
    assert cache._buffer.numel() < largest
    assert torch.isfinite(cache.kv).all()
