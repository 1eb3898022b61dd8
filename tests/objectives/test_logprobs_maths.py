"""Chunked log-probabilities equal the plain ones: values, entropies, all gradients, whatever the chunk."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from maths_helpers import f64, flags, idx
from torch import Tensor

from stepladder.objectives import logprobs as module
from stepladder.objectives.logprobs import chunked_logprobs, full_logprobs, next_token_targets

kept_or_not = pytest.mark.parametrize("kept_bytes", [0, module.KEPT_BYTES])
quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def inputs(
    seed: int, count: int = 6, width: int = 5, vocabulary: int = 11
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_()  # noqa: E731
    targets = torch.randint(0, vocabulary, (count,), generator=g)
    return draw(count, width), draw(vocabulary, width), draw(vocabulary), targets


def plain(
    hidden: Tensor, head: Tensor, bias: Tensor, targets: Tensor, temperature: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    z = hidden @ head.t() + bias
    z = z if cap is None else cap * torch.tanh(z / cap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)


@kept_or_not
@quick
@given(
    seed=st.integers(0, 10**6),
    chunk=st.integers(1, 8),
    temperature=st.floats(0.3, 2.0),
    cap=st.sampled_from([None, 2.0]),
    with_entropy=st.booleans(),
)
def test_equal_to_the_plain_form(
    monkeypatch: pytest.MonkeyPatch,
    kept_bytes: int,
    seed: int,
    chunk: int,
    temperature: float,
    cap: float | None,
    with_entropy: bool,
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(module, "BLOCK_ROWS", 1 + seed % 12)
    hidden, head, bias, targets = inputs(seed)
    weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lp, entropy = chunked_logprobs(
        hidden,
        head,
        targets,
        temperature=temperature,
        chunk=chunk,
        bias=bias,
        soft_cap=cap,
        differentiable_entropy=with_entropy,
    )
    lp_plain, entropy_plain = plain(hidden, head, bias, targets, temperature, cap)
    assert torch.allclose(lp, lp_plain)
    assert torch.allclose(entropy, entropy_plain)
    assert entropy.requires_grad == with_entropy
    total = (weights[0] * lp).sum() + ((weights[1] * entropy).sum() if with_entropy else 0.0)
    total_plain = (weights[0] * lp_plain).sum() + (
        (weights[1] * entropy_plain).sum() if with_entropy else 0.0
    )
    ours = torch.autograd.grad(total, (hidden, head, bias))
    theirs = torch.autograd.grad(total_plain, (hidden, head, bias))
    assert all(torch.allclose(x, y) for x, y in zip(ours, theirs, strict=True))


@quick
@given(
    seed=st.integers(0, 10**6),
    chunk=st.integers(1, 8),
    temperature=st.floats(0.3, 2.0),
    cap=st.sampled_from([None, 2.0]),
    rows=st.integers(1, 12),
)
def test_a_frozen_head_gives_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, seed: int, chunk: int, temperature: float, cap: float | None, rows: int
) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    hidden, head, _, targets = inputs(seed)
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
    how = {"temperature": temperature, "chunk": chunk, "soft_cap": cap}
    frozen, _ = chunked_logprobs(hidden, head.detach(), targets, **how)
    trained, _ = chunked_logprobs(hidden, head, targets, **how)
    slope = torch.autograd.grad((weights * frozen).sum(), hidden)[0]
    assert torch.allclose(slope, torch.autograd.grad((weights * trained).sum(), hidden)[0])


@kept_or_not
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, cap: float | None, with_entropy: bool
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    hidden, head, bias, targets = inputs(0, count=3, width=2, vocabulary=4)

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        both = chunked_logprobs(
            tensors[0],
            tensors[1],
            targets,
            temperature=0.7,
            chunk=2,
            bias=tensors[2],
            soft_cap=cap,
            differentiable_entropy=with_entropy,
        )
        return both if with_entropy else both[:1]

    assert torch.autograd.gradcheck(outputs, (hidden, head, bias))
    frozen = (head.detach(), bias.detach())
    assert torch.autograd.gradcheck(lambda h: outputs(h, *frozen), (hidden,))


@kept_or_not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_worked_in_float32(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)  # of 40: the last block is smaller
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(5, 16).to(dtype).requires_grad_(),
        torch.randn(40, 16).to(dtype).requires_grad_(),
    )
    targets = torch.randint(0, 40, (5,))
    lp, entropy = chunked_logprobs(hidden, head, targets, chunk=2)
    exact, exact_entropy = full_logprobs(hidden.double() @ head.double().t(), targets)
    assert lp.dtype == entropy.dtype == torch.float32
    assert torch.allclose(lp.double(), exact, atol=1e-5)
    assert torch.allclose(entropy.double(), exact_entropy, atol=1e-5)
    slopes = torch.autograd.grad(lp.sum(), (hidden, head))
    exact_slopes = torch.autograd.grad(exact.sum(), (hidden, head))
    for slope, expected in zip(slopes, exact_slopes, strict=True):
        assert slope.dtype == dtype
        assert torch.allclose(slope.double(), expected.double(), atol=0.05)
    frozen, _ = chunked_logprobs(hidden, head.detach(), targets, chunk=2)
    slope = torch.autograd.grad(frozen.sum(), hidden)[0]
    assert torch.allclose(slope.double(), exact_slopes[0].double(), atol=0.05)


@quick
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    temperature=st.floats(0.3, 2.0),
    cap=st.sampled_from([None, 3.0]),
    biased=st.booleans(),
)
def test_without_gradients_the_largest_logit_may_be_in_any_block(
    monkeypatch: pytest.MonkeyPatch, seed: int, rows: int, temperature: float, cap: float | None, biased: bool
) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    hidden, head, bias, targets = (
        t.bfloat16() if t.is_floating_point() else t for t in inputs(seed, vocabulary=40)
    )
    hidden = hidden * 3
    bias = bias * 5 if biased else bias * 0
    with torch.no_grad():
        got = chunked_logprobs(
            hidden,
            head,
            targets,
            temperature=temperature,
            chunk=2,
            soft_cap=cap,
            bias=bias if biased else None,
        )
        wanted = plain(hidden.double(), head.double(), bias.double(), targets, temperature, cap)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("products", ["cast", "direct"])
def test_a_token_that_is_nearly_certain_keeps_its_slope(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, products: str
) -> None:
    """Two tokens whose logits are 7 apart, in blocks of one: p = 1/(1 + e⁻⁷) = .99909, which bfloat16 rounds
    to 1; the slope of h is (1 − p)·(w₀ − w₁) all the same."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    if products == "direct":
        wide_products(monkeypatch)
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    head = torch.tensor([[7.0, 0.0], [0.0, 0.0]], dtype=torch.bfloat16, requires_grad=not frozen)
    lp, _ = chunked_logprobs(hidden, head, idx(0))
    (slope,) = torch.autograd.grad(lp.sum(), hidden)
    rest = 1 / (1 + math.e**7)  # 1 − p
    assert slope[0, 0].item() == pytest.approx(7 * rest, rel=2**-7)  # rounded twice
    assert lp.item() == pytest.approx(math.log(1 - rest), abs=1e-7)


def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does: products of halves whose results are float32."""

    class Room(module._Room):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.direct, self.cast = True, False

    real = torch.mm

    def mm(
        a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out_dtype is None:
            return real(a, b) if out is None else real(a, b, out=out)
        return real(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(module, "_Room", Room)
    monkeypatch.setattr(torch, "mm", mm)


@kept_or_not
@pytest.mark.parametrize("frozen", [False, True])
def test_wide_products_score_like_a_cast_head(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, frozen: bool
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", kept_bytes)
    hidden, head, bias, targets = (
        t.bfloat16() if t.is_floating_point() else t for t in inputs(3, vocabulary=40)
    )
    monkeypatch.setattr(module, "BLOCK_ROWS", 9)

    def both() -> list[Tensor]:
        h, w = hidden.detach().requires_grad_(), head.detach().requires_grad_(not frozen)
        lp, entropy = chunked_logprobs(h, w, targets, bias=bias.detach(), chunk=2)
        return [lp, entropy, *torch.autograd.grad(lp.sum(), (h,) if frozen else (h, w))]

    cast = both()
    wide_products(monkeypatch)
    for mine, theirs in zip(both(), cast, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_target_outside_the_head_is_never_a_number() -> None:
    """Devices other than a CPU do not look at targets before: there it must not pass for a probability."""
    hidden, head, _, _ = inputs(0)
    settings_ = module._Settings(1.0, 2, None, False, False)
    room = module._Room(hidden, head, torch.float64)
    with torch.no_grad():
        _, lp, _ = module._scores(room, hidden, head, None, idx(0, -100, 10, 11, 3, 1), settings_, None)
    assert torch.isnan(lp).tolist() == [False, True, False, True, False, False]


def test_autocast_does_not_reach_inside() -> None:
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(4, 8), torch.randn(9, 8), torch.randint(0, 9, (4,))
    outside, _ = chunked_logprobs(hidden, head, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = chunked_logprobs(hidden, head, targets)
    assert torch.equal(inside, outside)


def test_only_what_requires_a_gradient_gets_one() -> None:
    hidden, head, bias, targets = inputs(1)
    only_head, _ = chunked_logprobs(hidden.detach(), head, targets)
    only_head.sum().backward()
    assert hidden.grad is None
    assert head.grad is not None
    nothing, _ = chunked_logprobs(hidden.detach(), head.detach(), targets, bias=bias.detach())
    assert not nothing.requires_grad


def test_no_tensor_of_the_size_of_all_logits_is_kept_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor autograd saves, and every one made on the way, stays far below N·V elements once the
    slopes of all tokens are more than KEPT_BYTES."""
    count, vocabulary, chunk = 64, 100, 4
    monkeypatch.setattr(module, "KEPT_BYTES", count * vocabulary * 8 - 1)
    largest, saved = sizes(count, vocabulary, chunk)
    assert 0 < largest <= max(chunk * vocabulary, count * 5, vocabulary * 5)
    assert saved <= max(count * 5, vocabulary * 5)
    monkeypatch.setattr(module, "KEPT_BYTES", count * vocabulary * 8)
    assert sizes(count, vocabulary, chunk) == (count * vocabulary, count * vocabulary)


def sizes(count: int, vocabulary: int, chunk: int) -> tuple[int, int]:
    """(elements of the largest tensor made, of the largest one saved for the backward pass)."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, head, _, targets = inputs(2, count=count, vocabulary=vocabulary)
    saved = []
    with (
        Watch(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
    ):
        lp, _ = chunked_logprobs(hidden, head, targets, chunk=chunk)
        lp.sum().backward()
    return largest, max(saved)


def test_full_logprobs_by_hand() -> None:
    # z = (2, 1, 0), T = 1: lse = ln(e² + e + 1) = 2.407606
    lp, entropy = full_logprobs(f64([[2.0, 1.0, 0.0]]), idx(1))
    assert lp.item() == pytest.approx(1 - 2.407606, abs=1e-6)
    # H = lse − Σ p z = 2.407606 − (2·.665241 + .244728)
    assert entropy.item() == pytest.approx(2.407606 - 1.575210, abs=1e-5)


def test_an_empty_batch() -> None:
    hidden, head = torch.zeros(0, 3, requires_grad=True), torch.zeros(5, 3, requires_grad=True)
    lp, entropy = chunked_logprobs(hidden, head, torch.zeros(0, dtype=torch.long))
    lp.sum().backward()
    assert lp.shape == entropy.shape == (0,)
    assert torch.equal(head.grad, torch.zeros(5, 3))


def test_packed_documents_score_like_documents_alone() -> None:
    ids, mask = idx(5, 6, 7, 8, 9).unsqueeze(0), flags(0, 1, 1, 1, 1).unsqueeze(0)
    targets, trained = next_token_targets(ids, mask, segment_ids=idx(0, 0, 0, 1, 1).unsqueeze(0))
    first, first_mask = next_token_targets(ids[:, :3], mask[:, :3])
    second, second_mask = next_token_targets(ids[:, 3:], mask[:, 3:])
    assert targets[trained].tolist() == [*first[first_mask].tolist(), *second[second_mask].tolist()]
