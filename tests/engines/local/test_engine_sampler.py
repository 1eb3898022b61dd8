"""The two-level sampler: its distribution, its edges, its log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.engines.local.request import uniforms
from stepladder.engines.local.sampler import BLOCK, sample

SIZES = (1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def logits_of(rows: int, size: int, seed: int, holes: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 3
    dead = torch.rand(rows, size, generator=generator) < holes
    dead[torch.arange(rows), torch.randint(0, size, (rows,), generator=generator)] = False
    return logits.masked_fill(dead, -math.inf)


@settings(deadline=None, max_examples=150)
@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10_000),
    u=st.one_of(st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, 5e-324, 1 - 2**-53])),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    holes=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_a_drawn_token_is_possible_and_its_logprob_is_log_softmax(size, seed, u, temperature, holes):
    logits = logits_of(2, size, seed, holes)
    tokens, logprobs = sample(logits, [1, 0, 1], [temperature] * 3, [u, 0.5, 0.0])
    own = (logits / (temperature or 1.0)).log_softmax(-1)
    for row, token, logprob in zip([1, 0, 1], tokens, logprobs, strict=True):
        assert own[row, token] > -math.inf
        assert logprob == pytest.approx(own[row, token].item(), abs=1e-5)
        if temperature == 0:
            assert token == int(logits[row].argmax())


@settings(deadline=None, max_examples=80)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 10_000), u=st.floats(0.0, 1.0, exclude_max=True))
def test_it_is_the_inverse_cdf(size, seed, u):
    """The token is the smallest k with F(k) > u; F in float64, one part in a million apart."""
    logits = logits_of(1, size, seed)
    (token,), _ = sample(logits, [0], [1.0], [u])
    cdf = logits[0].double().softmax(-1).cumsum(-1)
    assert cdf[token] > u - 1e-6
    assert token == 0 or cdf[token - 1] <= u + 1e-6


def test_zero_probability_at_both_ends() -> None:
    """All mass in the middle of three blocks: u = 0 must skip the first, u -> 1 must stop before the last."""
    logits = torch.full((1, 3 * BLOCK), -math.inf)
    logits[0, BLOCK + 3], logits[0, BLOCK + 9] = 0.0, 0.0
    tokens, logprobs = sample(logits, [0] * 3, [1.0] * 3, [0.0, 1 - 2**-53, 0.5])
    assert tokens == [BLOCK + 3, BLOCK + 9, BLOCK + 9]  # F(first) = .5, so u = .5 is the second's
    assert logprobs == pytest.approx([math.log(0.5)] * 3)


def test_the_distribution() -> None:
    """Chi-square over 40 tokens of 600, 20,000 draws: the 99.9 % point of 39 degrees of freedom is 72.1."""
    logits = torch.full((1, 600), -math.inf)
    places = torch.arange(40) * 15
    logits[0, places] = torch.randn(40, generator=torch.Generator().manual_seed(3))
    count = 20_000
    drawn, _ = sample(logits, [0] * count, [0.7] * count, uniforms(5, count))
    expected = (logits[0] / 0.7).softmax(-1)[places].double().numpy() * count
    seen = np.bincount(drawn, minlength=600)[places.numpy()]
    assert seen.sum() == count
    assert ((seen - expected) ** 2 / expected).sum() < 72.1


def test_rows_and_temperatures_mix() -> None:
    logits = logits_of(3, 500, 1)
    rows, temperatures, us = [2, 0, 0, 2, 1], [1.0, 0.5, 0.0, 1.0, 2.0], [0.1, 0.9, 0.4, 0.8, 0.6]
    tokens, logprobs = sample(logits, rows, temperatures, us)
    for i in range(5):
        (token,), (logprob,) = sample(logits, [rows[i]], [temperatures[i]], [us[i]])
        assert (token, logprob) == (tokens[i], pytest.approx(logprobs[i], abs=1e-6))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = logits_of(2, 50, 0)
    logits[1, 7] = bad
    with pytest.raises(FloatingPointError, match="weights are broken"):
        sample(logits, [0, 1], [1.0, 1.0], [0.5, 0.5])


def test_random_streams_depend_on_the_seed_alone() -> None:
    assert uniforms(3, 5) == uniforms(3, 9)[:5]
    assert len({tuple(uniforms(seed, 3)) for seed in [*range(50), -1, 2**63]}) == 52
    assert all(0.0 <= u < 1.0 for u in uniforms(1, 1000))
