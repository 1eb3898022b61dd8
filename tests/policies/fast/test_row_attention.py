"""Attention over a packed row on a CPU: SDPA's values and gradients, whatever the blocks and the tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.batching import Block
from stepladder.policies.fast import tiles as cutting
from stepladder.policies.fast.row_attention import row_attention
from stepladder.policies.fast.tiles import Tiling, tiling


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
    cut=st.tuples(st.integers(2, 12), st.integers(1, 8), st.sampled_from([1, 40, 2**16]), st.integers(0, 60)),
    masked=st.booleans(),
)
def test_values_and_gradients_are_those_of_sdpa(
    seed: int,
    sizes: list[int],
    prefix: int,
    filling: int,
    kv: int,
    group: int,
    cut: tuple[int, int, int, int],
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
        patch.setattr(cutting, "SIZES", (cut[0],))
        for name, number in zip(("ROUND", "PAIRS", "OVERHEAD"), cut[1:], strict=True):
            patch.setattr(cutting, name, number)
        parts = tiling(blocks, prefix, length)
    ours = row_attention(q, k, v, parts, 0.4)
    mine = torch.autograd.grad(ours, leaves, grad)
    by_head = [t.transpose(0, 1)[None] for t in leaves]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *by_head, attn_mask=who_sees_whom(blocks, prefix, length), scale=0.4, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs)
    for own, wanted in zip(mine, torch.autograd.grad(theirs, leaves, grad), strict=True):
        torch.testing.assert_close(own, wanted)


def own_queries(parts: Tiling) -> list[list[int]]:
    """Of each tile, the batches one after the other."""
    rows = []
    for tiles in parts.batches:
        spare = set(tiles.spare.tolist())
        own = [None if i in spare else row for i, row in enumerate(tiles.queries.tolist())]
        size = len(own) // tiles.count
        rows += [[row for row in own[i : i + size] if row is not None] for i in range(0, len(own), size)]
    return rows


def test_pairs_that_no_query_of_a_tile_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two siblings of 64 after a prompt of 64: the second one's queries meet 128 tokens, not 192. The two of
    them are computed at once; what all queries see, the prompt and the first of their own, needs no mask."""
    monkeypatch.setattr(cutting, "SIZES", (64,))
    monkeypatch.setattr(cutting, "OVERHEAD", 0)
    own = np.tril(np.ones((192, 192), dtype=bool))
    own[128:, 64:128] = False
    both, prompt = tiling([Block(0, 192, own)], 0, 192).batches
    assert (both.count, both.first, prompt.count, prompt.first) == (2, 65, 1, 1)
    assert both.columns is not None
    assert both.columns.tolist() == [*range(128), *range(64), *range(128, 192)]
    assert (prompt.columns, prompt.low, prompt.high) == (None, 0, 64)  # a stretch of the row
    assert both.queries.tolist() == list(range(64, 192))
    assert len(both.spare) == 0


def test_short_blocks_share_a_tile_and_long_ones_end_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SIZES", (64,))
    blocks = [Block(0, 10, None), Block(10, 20, None), Block(20, 60, None), Block(60, 160, None)]
    tiles = [rows for rows in own_queries(tiling(blocks, 0, 160)) if rows]
    assert sorted((rows[0], len(rows)) for rows in tiles) == [(0, 60), (60, 64), (124, 36)]


def test_a_block_that_fits_a_tile_of_its_own_is_not_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SIZES", (64,))
    blocks = [Block(0, 30, None), Block(30, 90, None), Block(90, 150, None)]
    tiles = [rows for rows in own_queries(tiling(blocks, 0, 150)) if rows]
    assert sorted((rows[0], len(rows)) for rows in tiles) == [(0, 30), (30, 60), (90, 60)]


def test_a_token_that_fills_a_tile_up_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 tokens in tiles of 4, three tiles a batch at least: 7 places repeat a token; its key gets its
    gradient from its own place alone. All keys 0: each of t tokens gets 1/t of a query's probability, so the
    gradient of value j is the sum of 1/(t + 1) over the queries t >= j."""
    monkeypatch.setattr(cutting, "SIZES", (4,))
    monkeypatch.setattr(cutting, "COUNTS", (3,))
    parts = tiling([Block(0, 5, None)], 0, 5)
    assert sum(len(tiles.spare) for tiles in parts.batches) == 7
    q, k = torch.zeros(5, 1, 2), torch.zeros(5, 1, 2)
    v = torch.zeros(5, 1, 1, requires_grad=True)
    row_attention(q, k, v, parts, 1.0).sum().backward()
    wanted = [sum(1 / (t + 1) for t in range(j, 5)) for j in range(5)]
    torch.testing.assert_close(v.grad.flatten(), torch.tensor(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_as_near_as_the_kernel_of_torch(dtype: torch.dtype) -> None:
    """Beside float64, on the types that training uses, for a group of siblings behind a prompt."""
    own = np.tril(np.ones((72, 72), dtype=bool))
    own[44:, 16:44] = False
    blocks, g = [Block(0, 72, own)], torch.Generator().manual_seed(0)
    exact = [torch.randn(72, heads, 16, generator=g, dtype=torch.float64) for heads in (4, 2, 2)]
    leaves = [t.to(dtype).requires_grad_() for t in exact]
    grad = torch.randn(72, 4, 16, generator=g).to(dtype)
    ours = row_attention(*leaves, tiling(blocks, 0, 72), 0.25)

    def kernel(tensors: list[torch.Tensor]) -> torch.Tensor:
        mask, by_head = who_sees_whom(blocks, 0, 72), [t.transpose(0, 1)[None] for t in tensors]
        out = torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=mask, scale=0.25, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth, theirs = kernel(wide), kernel(leaves)
    true_grads = torch.autograd.grad(truth, wide, grad.double())
    mine, others = torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad)
    for a, b, c in zip((ours, *mine), (theirs, *others), (truth, *true_grads), strict=True):
        own_error, their_error = (float((x - c).detach().norm()) for x in (a, b))
        assert own_error <= 1.5 * their_error


def test_a_long_row_needs_no_memory_that_grows_with_its_square() -> None:
    """8,192 tokens of one sequence: masks and indices of a few megabytes (a boolean square has 67), and no
    tile with more pairs than allowed."""
    parts = tiling([Block(0, 8192, None)], 0, 8192)
    held = [t for tiles in parts.batches for t in (tiles.hidden, tiles.columns) if t is not None]
    assert sum(t.numel() * t.element_size() for t in held) < 4e6
    for tiles in parts.batches:
        assert len(tiles.queries) // tiles.count * (tiles.high - tiles.low) <= cutting.MOST
