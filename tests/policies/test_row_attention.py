"""Attention over a packed row on a CPU: SDPA's values and gradients, whatever the blocks and the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.batching import Block
from stepladder.policies import row_attention as cpu


def random_blocks(
    rng: np.random.Generator, sizes: list[int], prefix: int, masked: bool
) -> tuple[list[Block], int]:
    """Blocks after a prefix, and where they end; a mask shows each token itself, the prefix, and some."""
    blocks, at = [], prefix
    for size in sizes:
        mask = None
        if masked or prefix:
            own = np.tril(rng.random((size, size)) < 0.5) | np.eye(size, dtype=bool)
            mask = np.concatenate([np.ones((size, prefix), dtype=bool), own], axis=1)
        blocks.append(Block(at, at + size, mask))
        at += size
    return blocks, at


def who_sees_whom(blocks: list[Block], prefix: int, length: int) -> torch.Tensor:
    """[length, length], written out: the prefix is causal, so is what fills the row up at its end."""
    seen = np.zeros((length, length), dtype=bool)
    for i in range(prefix):
        seen[i, : i + 1] = True
    for block in blocks:
        for i in range(block.start, block.end):
            if block.mask is None:
                seen[i, block.start : i + 1] = True
            else:
                seen[i, :prefix] = block.mask[i - block.start, :prefix]
                seen[i, block.start : block.end] = block.mask[i - block.start, prefix:]
    end = blocks[-1].end
    for i in range(end, length):
        seen[i, end : i + 1] = True
    return torch.from_numpy(seen)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    prefix=st.integers(0, 4),
    filling=st.integers(0, 5),
    kv=st.sampled_from([1, 2]),
    group=st.integers(1, 3),
    cut=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 8)),
    masked=st.booleans(),
)
def test_values_and_gradients_are_those_of_sdpa(
    seed: int,
    sizes: list[int],
    prefix: int,
    filling: int,
    kv: int,
    group: int,
    cut: tuple[int, int, int],
    masked: bool,
) -> None:
    blocks, end = random_blocks(np.random.default_rng(seed), sizes, prefix, masked)
    length = end + filling
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(length, kv * group, 4), draw(length, kv, 4), draw(length, kv, 6)  # values of another width
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad = draw(length, kv * group, 6)
    with pytest.MonkeyPatch.context() as patch:
        for name, number in zip(("STRETCH", "SHORT", "ROUND"), cut, strict=True):
            patch.setattr(cpu, name, number)
        parts = cpu.stretches(blocks, prefix, length)
    assert [p.start for p in parts] == [0, *(p.end for p in parts[:-1])]
    assert parts[-1].end == length
    ours = cpu.row_attention(q, k, v, parts, 0.4)
    mine = torch.autograd.grad(ours, leaves, grad)
    by_head = [t.transpose(0, 1)[None] for t in leaves]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *by_head, attn_mask=who_sees_whom(blocks, prefix, length), scale=0.4, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs)
    for own, wanted in zip(mine, torch.autograd.grad(theirs, leaves, grad), strict=True):
        torch.testing.assert_close(own, wanted)


def test_pairs_that_no_query_of_a_stretch_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two siblings of 64 after a prompt of 64: the second one's queries meet 128 tokens, not 192."""
    monkeypatch.setattr(cpu, "STRETCH", 64)
    own = np.tril(np.ones((192, 192), dtype=bool))
    own[128:, 64:128] = False
    parts = cpu.stretches([Block(0, 192, own)], 0, 192)
    assert [(p.start, p.count, p.runs) for p in parts] == [
        (0, 64, (slice(0, 64),)),
        (64, 128, (slice(0, 128),)),
        (128, 128, (slice(0, 64), slice(128, 192))),
    ]
    assert [p.first for p in parts] == [1, 65, 65]  # what all queries see needs nothing added


def test_short_blocks_share_a_stretch_and_long_ones_end_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "STRETCH", 64)
    blocks = [Block(0, 10, None), Block(10, 20, None), Block(20, 60, None), Block(60, 160, None)]
    parts = cpu.stretches(blocks, 0, 160)
    assert [(p.start, p.end) for p in parts] == [(0, 60), (60, 124), (124, 160)]
    assert [p.count for p in parts] == [64, 64, 128]  # 60, 64 and 100, rounded up
