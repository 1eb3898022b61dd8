"""Shared prefixes change no gradient: random trees of samples, packed, against each sequence by itself.

The sequences by themselves go through the model's own forward pass (transformers' SDPA), one at a time: no
packing, no sharing, none of our attention.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spine import alone, gradients, sample, tiny_policy

from stepladder.data.batching import micro_batches
from stepladder.policies.fast import tiles
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample

Tree = tuple[list[TrainingSample], list[float]]  # samples, and a weight for each of all their tokens


@functools.cache
def policy_of(arch: str) -> Policy:
    policy = tiny_policy(arch)  # type: ignore[arg-type]
    assert policy.mode == "packed"
    return policy


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Each sample takes some of an earlier one, from nothing to all of it, and goes on from there, perhaps by
    nothing: copies, prefixes of others, late and early forks and strangers. Any token may be trained but the
    first, and groups may have nothing in common, or belong together and lie in two."""
    samples: list[TrainingSample] = []
    for i in range(draw(st.integers(1, 7))):
        before: tuple[int, ...] = ()
        if samples:
            parent = draw(st.sampled_from(samples)).token_ids
            before = parent[: draw(st.integers(0, len(parent)))]
        more = draw(st.lists(st.integers(8, 12), min_size=0 if before else 1, max_size=14))
        ids = (*before, *more)
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        group = f"g{draw(st.integers(0, 2))}"
        samples.append(sample(ids, 0, mask=mask, trajectory=f"t{i}", group=group))
    count = sum(len(s.token_ids) for s in samples)
    weights = draw(st.lists(st.floats(-1, 1, width=32), min_size=count, max_size=count))
    return samples, weights


def hand_made(*pairs: tuple[list[int], int, str]) -> Tree:
    samples = [
        sample(ids, prompt, trajectory=f"t{i}", group=group) for i, (ids, prompt, group) in enumerate(pairs)
    ]
    return samples, [(-1) ** i * 0.5 + i / 100 for i in range(sum(len(s.token_ids) for s in samples))]


IDENTICAL = hand_made(([9, 8, 10, 11], 1, "a"), ([9, 8, 10, 11], 1, "a"), ([9, 8, 10, 11], 2, "b"))
PREFIX = hand_made(([9, 8, 10, 11, 12], 1, "a"), ([9, 8, 10], 1, "a"), ([9, 8], 1, "a"))
STRANGERS = hand_made(([8, 9, 10], 1, "a"), ([9, 9, 10], 1, "a"), ([10, 9], 1, "b"))
ONE_TOKEN = hand_made(([8], 1, "a"), ([8, 9], 1, "a"))


def packed_gradients(policy: Policy, tree: Tree, budget: int) -> dict[str, torch.Tensor]:
    """Of the sum of weight · log p, in micro-batches."""
    samples, weights = tree
    tables = torch.split(torch.tensor(weights), [len(s.token_ids) for s in samples])
    for rows in micro_batches(samples, budget):
        scores = policy.logprobs([samples[i] for i in rows])
        for b, i in enumerate(rows):
            width = len(samples[i].token_ids)
            (scores.logprobs[b, :width] * tables[i]).sum().backward(retain_graph=True)
    return gradients(policy)


def separate_gradients(policy: Policy, tree: Tree) -> dict[str, torch.Tensor]:
    samples, weights = tree
    tables = torch.split(torch.tensor(weights), [len(s.token_ids) for s in samples])
    for one, table in zip(samples, tables, strict=True):
        if any(one.mask):
            (alone(policy, one) * table[torch.tensor(one.mask)]).sum().backward()
    return gradients(policy)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2"])
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(tree=trees(), budget=st.integers(1, 80), size=st.sampled_from([2, 5, 64]))
@example(tree=IDENTICAL, budget=80, size=64)
@example(tree=PREFIX, budget=80, size=2)
@example(tree=STRANGERS, budget=80, size=64)
@example(tree=ONE_TOKEN, budget=80, size=64)
def test_every_gradient_equals_that_of_separate_sequences(
    arch: str, tree: Tree, budget: int, size: int
) -> None:
    policy = policy_of(arch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SIZES", (size,))
        together = packed_gradients(policy, tree, budget)
    for name, wanted in separate_gradients(policy, tree).items():
        scale = max(1.0, float(wanted.abs().max()))  # a sum of hundreds has fewer decimals
        torch.testing.assert_close(together[name] / scale, wanted / scale, rtol=0, atol=1e-5, msg=name)


def test_a_shared_prefix_was_computed_once() -> None:
    """Else the proof above would be about nothing: of two copies one is computed, but for its last token."""
    assert policy_of("llama").logprobs(IDENTICAL[0][:2]).tokens_computed == 3
