"""Packing changes nothing: shared prefixes, blocks and micro-batches against one sequence at a time."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spine import alone, gradients, random_samples, sample, tiny_policy

from stepladder.data.batching import micro_batches, pack
from stepladder.data.prefix import common_prefix
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample

ARCHITECTURES = ("llama", "qwen3", "gpt2")


@functools.cache
def packed_policy(arch: str) -> Policy:
    policy = tiny_policy(arch, mode="packed")  # type: ignore[arg-type]
    assert policy._probe() == "packed"
    return policy


@st.composite
def tries(draw: st.DrawFn) -> list[TrainingSample]:
    """Samples over a small alphabet, so that they share prefixes of every length; some are copies."""
    groups = draw(st.integers(1, 3))
    head = draw(st.lists(st.integers(8, 11), min_size=1, max_size=12))
    out = []
    for g in range(groups):
        prompt = head + draw(st.lists(st.integers(8, 11), max_size=3))
        for i in range(draw(st.integers(1, 4))):
            ids = prompt + draw(st.lists(st.integers(8, 10), min_size=1, max_size=6))
            mask = [False] * len(prompt) + draw(
                st.lists(st.booleans(), min_size=len(ids) - len(prompt), max_size=len(ids) - len(prompt))
            )
            out.append(sample(ids, 0, mask=mask, trajectory=f"{g}/{i}", group=f"g{g}"))
    return draw(st.permutations(out))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@settings(deadline=None, max_examples=25)
@given(samples=tries())
def test_packed_log_probabilities_are_those_of_each_sequence_alone(
    arch: str, samples: list[TrainingSample]
) -> None:
    policy = packed_policy(arch)
    with torch.no_grad():
        scores = policy.logprobs(samples, temperature=0.7)
        for row, (one, got) in enumerate(zip(samples, scores.logprobs, strict=True)):
            mask = torch.tensor(one.mask)
            assert scores.mask[row, : len(mask)].tolist() == list(one.mask)
            assert not scores.mask[row, len(mask) :].any()
            torch.testing.assert_close(got[: len(mask)][mask], alone(policy, one, 0.7), rtol=0, atol=2e-5)
            assert not got[~scores.mask[row]].any()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_a_packed_batch_are_the_sum_of_each_alone(arch: str, seed: int) -> None:
    policy = packed_policy(arch)
    samples = random_samples(7, groups=3, seed=seed)
    weights = torch.linspace(-1, 1, 7)  # an advantage each, so that errors of sign and of row show
    scores = policy.logprobs(samples)
    (scores.logprobs.sum(1) * weights).sum().backward()
    together = gradients(policy)
    for one, weight in zip(samples, weights, strict=True):
        (alone(policy, one).sum() * weight).backward()
    for name, separate in gradients(policy).items():
        scale = max(1.0, float(separate.abs().max()))
        torch.testing.assert_close(together[name] / scale, separate / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_group_never_sees_another(arch: str) -> None:
    """Other tokens in one group leave the log-probabilities of the others as they are (fault 25)."""
    policy = packed_policy(arch)
    samples = random_samples(6, groups=3)
    changed = [
        s
        if s.group_id != "g1"
        else sample([*s.token_ids[:10], *(40 + t % 50 for t in s.token_ids[10:])], 13, group="g1")
        for s in samples
    ]
    with torch.no_grad():
        before, after = policy.logprobs(samples), policy.logprobs(changed)
    for i, s in enumerate(samples):
        if s.group_id == "g1":
            assert not torch.equal(before.logprobs[i][before.mask[i]], after.logprobs[i][after.mask[i]])
        else:
            torch.testing.assert_close(before.logprobs[i], after.logprobs[i], rtol=0, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_token_never_sees_what_follows_it_or_its_siblings(arch: str) -> None:
    """The last token of one sibling changes: everything before it, and the other siblings, stay."""
    policy = packed_policy(arch)
    head = list(range(20, 34))
    first, second = sample([*head, 9, 10, 11], 14, trajectory="a"), sample([*head, 9, 12], 14, trajectory="b")
    other = sample([*head, 9, 10, 60], 14, trajectory="a")
    with torch.no_grad():
        before = policy.logprobs([first, second]).logprobs
        after = policy.logprobs([other, second]).logprobs
    torch.testing.assert_close(before[0, :16], after[0, :16], rtol=0, atol=1e-6)
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=1e-6)
    assert before[0, 16] != after[0, 16]


def test_the_drawing_in_the_docstring() -> None:
    """A B C d e / A B C d f / A B X g: each distinct prefix once, positions from the depth."""
    a, b, c, d, e, f, x, g = range(10, 18)
    packed = pack(
        [
            sample([a, b, c, d, e], 3, trajectory="1"),
            sample([a, b, c, d, f], 3, trajectory="2"),
            sample([a, b, x, g], 3, trajectory="3"),
        ]
    )
    assert packed.token_ids.tolist() == [a, b, c, d, e, f, x, g]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 2, 3]
    (block,) = packed.blocks
    assert block.mask is not None
    seen = [[int(j) for j in row.nonzero()[0]] for row in block.mask]
    assert seen[4:] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 6], [0, 1, 6, 7]]
    # d, e, f, g are scored; d once, though two samples train it.
    assert sorted(packed.targets.tolist()) == [d, e, f, g]
    by_target = dict(zip(packed.targets.tolist(), packed.sources.tolist(), strict=True))
    assert by_target == {d: 2, e: 3, f: 3, g: 6}
    assert [at.tolist() for at, _ in packed.places] == [[3, 4], [3, 4], [3]]


def test_a_head_that_all_groups_share_is_computed_once() -> None:
    head = list(range(20, 32))
    samples = [
        sample([*head, 40 + g, 50 + i], 13, trajectory=f"{g}{i}", group=str(g))
        for g in (0, 1)
        for i in (0, 1)
    ]
    packed = pack(samples)
    assert packed.prefix == 12
    assert packed.num_tokens == 12 + 2 * (1 + 2)
    assert pack(samples, share_prefixes=False).num_tokens == sum(len(s.token_ids) for s in samples)


def test_one_chain_needs_no_mask() -> None:
    assert pack([sample([5, 6, 7], 1)]).blocks[0].mask is None


def test_a_sample_that_is_the_prefix_of_another() -> None:
    packed = pack([sample([5, 6, 7], 1, trajectory="a"), sample([5, 6, 7, 8], 1, trajectory="b")])
    assert packed.token_ids.tolist() == [5, 6, 7, 8]
    assert sorted(packed.targets.tolist()) == [6, 7, 8]


def test_tokens_that_no_score_depends_on_are_left_out() -> None:
    """5 6 [7] 8 9: what predicts 7 is 6, so 7 and all after it are not computed. Of 5 6 [7] [8] in the same
    group 7 is needed after all. A sample without trained tokens keeps one, for a row must have some."""
    cut = sample([5, 6, 7, 8, 9], 2, mask=[False, False, True, False, False], trajectory="a", group="a")
    packed = pack([cut], scored_only=True)
    assert packed.token_ids.tolist() == [5, 6]
    assert (packed.sources.tolist(), packed.targets.tolist()) == ([1], [7])
    both = pack([cut, sample([5, 6, 7, 8], 2, trajectory="b", group="a")], scored_only=True)
    assert both.token_ids.tolist() == [5, 6, 7]
    assert sorted(zip(both.sources.tolist(), both.targets.tolist(), strict=True)) == [(1, 7), (2, 8)]
    assert pack([cut]).num_tokens == 5
    assert pack([sample([5, 6, 7], 3)], scored_only=True).num_tokens == 1


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert min(len(a), len(b)) >= n
    assert n == min(len(a), len(b)) or a[n] != b[n]
    assert common_prefix("".join(map(str, a)), "".join(map(str, b))) == n


@settings(deadline=None)
@given(samples=tries(), budget=st.integers(1, 60), split=st.booleans())
def test_micro_batches_lose_nothing_and_keep_trajectories_whole(
    samples: list[TrainingSample], budget: int, split: bool
) -> None:
    if split:  # the last sample continues the first one's trajectory
        one = samples[0]
        samples = [
            *samples,
            sample(
                (*one.token_ids, 9),
                0,
                mask=(*one.mask, True),
                trajectory=one.trajectory_id,
                group=one.group_id,
            ),
        ]
    batches = micro_batches(samples, budget)
    assert sorted(i for rows in batches for i in rows) == list(range(len(samples)))
    assert all(batches)
    home = {}
    for k, rows in enumerate(batches):
        for i in rows:
            assert home.setdefault((samples[i].group_id, samples[i].trajectory_id), k) == k
        trajectories = {(samples[i].group_id, samples[i].trajectory_id) for i in rows}
        distinct = sum(
            pack([samples[i] for i in rows if samples[i].group_id == g]).num_tokens
            for g in {samples[i].group_id for i in rows}
        )
        assert distinct <= budget or len(trajectories) == 1


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="usual value"):
        micro_batches([sample([1, 2], 1)], 0)


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        pack([])
