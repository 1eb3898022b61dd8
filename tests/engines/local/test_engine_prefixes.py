"""The prefix cache against a naive one, and the planning of prefill."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.prefix import common_prefix
from stepladder.engines import scripted
from stepladder.engines.local import admission
from stepladder.engines.local.admission import batches, shared_prefixes
from stepladder.engines.local.prefix_cache import PrefixCache, join

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def contents(ids: tuple[int, ...], start: int, end: int) -> torch.Tensor:
    """Stand-in keys and values: position i holds a number that names the whole prefix up to i."""
    values = [float(hash(ids[: i + 1]) % 10_007) for i in range(start, end)]
    return torch.tensor(values).view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 1).clone()


def stored(cache: PrefixCache, ids: tuple[int, ...]) -> int:
    """Match, check what came back, return its length."""
    depth, pieces = cache.match(ids)
    if depth:
        torch.testing.assert_close(join(pieces), contents(ids, 0, depth), rtol=0, atol=0)
    return depth


@settings(deadline=None, max_examples=150)
@given(st.lists(IDS, max_size=12), st.lists(IDS, min_size=1, max_size=6))
def test_a_match_is_the_longest_stored_prefix_and_its_own_contents(inserted, asked) -> None:
    cache = PrefixCache(1 << 30)
    for ids in inserted:
        cache.insert(ids, lambda start, end, ids=ids: contents(ids, start, end))
    for ids in asked:
        assert stored(cache, ids) == max((common_prefix(ids, known) for known in inserted), default=0)
    distinct = {ids[: i + 1] for ids in inserted for i in range(len(ids))}
    assert cache.bytes == 2 * 4 * len(distinct)  # every distinct prefix once: 2 floats a position


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(IDS, st.booleans()), max_size=8), st.one_of(st.integers(0, 160), st.just(1 << 30)))
def test_memory_stays_in_bounds_and_what_is_left_is_right(inserted, limit) -> None:
    """At most `limit` bytes beyond the path just inserted (12 positions of 8 bytes)."""
    cache, held = PrefixCache(limit), []
    for ids, close in inserted:
        node = cache.insert(ids, lambda start, end, ids=ids: contents(ids, start, end))
        cache.hold(node)
        held.append(node)
        assert cache.bytes <= max(limit, 8 * len(ids))
        if close:
            cache.release(held.pop(0))
        for known, _ in inserted:
            stored(cache, known)
    for node in held:
        cache.release(node)
    if limit == 1 << 30:  # nothing was evicted or shared on purpose, and every session is closed
        assert cache.bytes == 0


def test_release_keeps_what_others_need() -> None:
    cache = PrefixCache(1 << 30)
    system, a, b = (1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6)
    cache.insert(system, lambda s, e: contents(system, s, e), keep=True)
    nodes = [cache.insert(ids, lambda s, e, ids=ids: contents(ids, s, e)) for ids in (a, b)]
    for node in nodes:
        cache.hold(node)
    cache.release(nodes[0])
    assert (stored(cache, a), stored(cache, b)) == (4, 5)
    cache.release(nodes[1])
    assert (stored(cache, a), stored(cache, b)) == (3, 3)
    cache.clear()
    assert (stored(cache, a), cache.bytes) == (0, 0)


def test_release_after_clear_is_harmless() -> None:
    cache = PrefixCache(1 << 30)
    old = cache.insert((1, 2), lambda s, e: contents((1, 2), s, e))
    cache.hold(old)
    cache.clear()
    new = cache.insert((1, 2), lambda s, e: contents((1, 2), s, e))
    cache.hold(new)
    cache.release(old)
    assert (stored(cache, (1, 2)), cache.bytes) == (2, 16)


@settings(deadline=None, max_examples=150)
@given(st.lists(IDS, max_size=10), st.integers(1, 4))
def test_shared_prefixes_are_shared_and_leave_a_token_to_compute(prompts, least) -> None:
    found = shared_prefixes(prompts, lambda ids: 0, least)
    for i, prefix in enumerate(found):
        users = [ids for ids in set(prompts) if ids[: len(prefix)] == prefix and len(ids) > len(prefix)]
        assert len(users) >= 2
        earlier = max((len(p) for p in found[:i] if prefix[: len(p)] == p), default=0)
        assert len(prefix) - earlier >= least


def test_a_known_prefix_is_not_computed_again() -> None:
    prompts = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]
    assert shared_prefixes(prompts, lambda ids: 0, 2) == [(1, 2, 3, 4)]
    assert shared_prefixes(prompts, lambda ids: 3, 2) == []
    assert shared_prefixes([(1, 2, 3), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7)], lambda ids: 0, 2) == [
        (1, 2),
        (1, 2, 3, 4, 5),
    ]


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 2000), st.booleans())
def test_batches_cover_everything_within_the_budget(lengths, budget, ragged) -> None:
    lengths.sort(reverse=True)
    sizes = batches(lengths, budget, ragged=ragged)
    assert sum(sizes) == len(lengths)
    start = 0
    for size in sizes:
        part = lengths[start : start + size]
        assert size == 1 or (sum(part) if ragged else size * part[0]) <= budget
        assert ragged or part[-1] * 3 >= min(2 * part[0], 3 * (part[0] - 8))
        start += size


@pytest.mark.parametrize("module", [admission, scripted])
def test_examples_in_the_docstrings(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
