"""Layers that keep less: equal outputs bit for bit, equal gradients, and only where that is so."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_models import tiny
from spine import random_samples, tiny_policy
from torch import nn

from stepladder.objectives import logprobs
from stepladder.policies.fast.lean import lean_layers, recompute_layers
from stepladder.policies.optimizer import MasterOptimizer

IDS = torch.tensor([[5, 7, 11, 0, 7, 9, 0, 3]])  # 0 is the padding token of these models


def backward(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    (logits.float() ** 2).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "norms", "mlps"),
    [("llama", 7, 3), ("qwen3", 13, 3), ("gemma3", 0, 0), ("gpt2", 0, 0)],
    # llama: two norms a layer and a last one; qwen3: two more on queries and keys; gemma3's norm multiplies
    # by 1 + w and its MLP has a GELU; gpt2 has neither.
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_outputs_and_gradients(kind: str, norms: int, mlps: int, dtype: torch.dtype) -> None:
    plain = tiny(kind).to(dtype)
    lean = copy.deepcopy(plain)
    assert lean_layers(lean) == norms + mlps
    assert torch.equal(lean(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    theirs, ours = backward(plain), backward(lean)
    assert ours.keys() == theirs.keys()
    near = 1e-5 if dtype == torch.float32 else 0.05
    for name, gradient in theirs.items():
        scale = float(gradient.float().abs().max())
        assert float((ours[name].float() - gradient.float()).abs().max()) <= near * scale, name


class LateRMSNorm(nn.Module):
    """Rounds after the product with the weight, which shows only where the weight is not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        self.variance_epsilon = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * scaled).to(x.dtype)


def test_a_norm_that_rounds_elsewhere_is_left_alone_also_before_training() -> None:
    norm = LateRMSNorm()
    assert lean_layers(nn.Sequential(norm)) == 0
    assert torch.equal(norm.weight, torch.ones(16))  # the trial was another's


def test_a_sparse_embedding_is_left_alone() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    lean_layers(nn.Sequential(embedding))
    embedding(torch.tensor([1, 3])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3"])
def test_recomputed_layers_keep_less_and_give_the_same(kind: str) -> None:
    """Counted: what autograd saves; a layer's insides are most of it."""

    def kept(model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            logits = model(input_ids=IDS, use_cache=False).logits
        model.zero_grad()
        (logits.float() ** 2).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, sum(
            sizes
        )

    model = tiny(kind)
    lean_layers(model)
    wanted, much = kept(model)
    assert recompute_layers(model)
    assert not recompute_layers(model)
    got, little = kept(model)
    assert little < 0.6 * much
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient)
    with torch.no_grad():
        model(input_ids=IDS)


def test_a_copy_computes_with_its_own_weights() -> None:
    """The critic and a frozen reference are deep copies of a policy."""
    model = tiny("llama")
    lean_layers(model)
    other = copy.deepcopy(model)
    before = other(input_ids=IDS).logits
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(other(input_ids=IDS).logits, before)


def test_an_adapter_on_the_last_projection_is_used() -> None:
    model = tiny("llama")
    lean_layers(model)

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 4, 32)
    once = mlp(x)
    mlp.down_proj.__class__ = Twice
    torch.testing.assert_close(mlp(x), 2 * once)


@pytest.mark.parametrize("kept_bytes", [0, logprobs.KEPT_BYTES])
def test_gradients_summed_by_rows_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """A tied embedding in bf16 gets its gradient from both ends through the optimiser: over two
    micro-batches the sum is what autograd gives without an optimiser, up to the rounding of bf16."""
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(logprobs, "BLOCK_ROWS", 5)
    policy = tiny_policy(dtype=torch.bfloat16)
    assert policy.lm.get_input_embeddings().weight is policy.lm.get_output_embeddings().weight
    batches = [random_samples(3, seed=1), random_samples(3, seed=2)]
    for batch in batches:
        policy.logprobs(batch).logprobs.sum().backward()
    expected = {name: p.grad.float() for name, p in policy.trainable().items()}
    policy.model.zero_grad()
    optimizer = MasterOptimizer(policy.trainable())
    for batch in batches:
        policy.logprobs(batch).logprobs.sum().backward()
    assert all(p.grad is None for p in policy.trainable().values())
    for name, gradient in expected.items():
        summed = optimizer.masters[name].grad
        assert summed is not None
        assert float((summed - gradient).norm()) <= 0.02 * float(gradient.norm()), name
    optimizer.close()
    policy.logprobs(batches[0]).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())  # autograd's again
