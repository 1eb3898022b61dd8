"""One pass over rows of any lengths, whatever their caches hold, equals the model's own logits of each."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from engine_models import prompt, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.engines.local.forward import Forward
from stepladder.engines.local.select import choose_path
from stepladder.engines.weights import PolicyView

KINDS = [("llama", True), ("qwen3", True), ("llama", False), ("gemma3", False)]


@cache
def forward_of(kind: str, fused: bool) -> tuple[object, Forward]:
    model = tiny(kind)
    view = PolicyView(model, torch.device("cpu"), None)
    return model, choose_path(view, 200, fused).forward


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_pass_over_ragged_rows(
    kind: tuple[str, bool], rows: list[tuple[int, int]], slot: int, every: bool
) -> None:
    """`rows`: (tokens in the cache, new tokens) of each; those that decode (one new token) lie anywhere."""
    model, forward = forward_of(*kind)
    texts = [prompt(start + count, seed) for seed, (start, count) in enumerate(rows)]
    forward.clear()
    forward.reserve(slot + len(rows), 64)
    with torch.no_grad():
        for i, (start, _) in enumerate(rows):
            if start:
                forward.run([texts[i][:start]], [0], slot + i)
        new = [text[start:] for text, (start, _) in zip(texts, rows, strict=True)]
        got = forward.run(new, [start for start, _ in rows], slot, every=every)
        expected = []
        for text, (start, _) in zip(texts, rows, strict=True):
            own = model(torch.tensor([text])).logits[0]  # type: ignore[operator]
            expected.append(own[start:] if every else own[-1:])
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompts_of_unequal_length_attend_side_by_side(kind: str) -> None:
    """Also behind what their caches hold; the values are those of the passes above, here it is made sure
    that they come from one span which was filled up."""
    model, forward = forward_of(kind, True)
    rows = [(0, 16), (2, 14), (0, 15), (1, 14)]
    lengths, starts = [new for _, new in rows], [start for start, _ in rows]
    forward.reserve(4, 64)
    (span,) = forward.layout(lengths, starts, 0).spans  # type: ignore[attr-defined]
    assert (span.rows, span.queries, span.read) == (4, 16, 32)
    assert span.gather is not None
    assert span.by_head.dtype == torch.float32
    texts = [prompt(start + new, seed) for seed, (start, new) in enumerate(rows)]
    with torch.no_grad():
        for i, start in enumerate(starts):
            if start:
                forward.run([texts[i][:start]], [0], i)
        got = forward.run([t[s:] for t, s in zip(texts, starts, strict=True)], starts, 0)
        expected = [model(torch.tensor([text])).logits[0, -1:] for text in texts]  # type: ignore[operator]
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-4, rtol=1e-4)


def test_a_long_prompt_alone_has_a_mask_for_all_heads_at_once() -> None:
    """The second piece of a prompt: one mask, of four dimensions, which torch's fast kernel takes."""
    _, forward = forward_of("llama", True)
    forward.reserve(1, 128)
    (span,) = forward.layout([40], [60], 0).spans  # type: ignore[attr-defined]
    assert (tuple(span.mask.shape), span.by_head) == ((1, 1, 40, 100), None)
