"""Sizes from a config.json: known counts, the models' own counts, and what autograd really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from spine import random_samples

from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.errors import ConfigError
from stepladder.planning.shape import forward_flops, lora_parameters, saved_bytes, shape_of
from stepladder.policies.policy import FILL, Policy
from stepladder.policies.tiny import Architecture, tiny_model

SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}


def test_smollm2() -> None:
    """Embeddings 49152·576 = 28,311,552. A layer: q and o 2·576·576 = 663,552, k and v 2·576·192 = 221,184,
    MLP 3·576·1536 = 2,654,208, norms 2·576 = 1,152, together 3,540,096. Thirty of them 106,202,880; the last
    norm 576. In all 134,515,008, which is what the model card's file holds.

    Cache: 2 · 30 layers · 3 heads · 64 = 11,520 numbers a token, 23,040 bytes in bfloat16."""
    shape = shape_of(SMOL)
    assert (shape.embedding, shape.output, shape.parameters) == (28_311_552, 0, 134_515_008)
    assert shape.kv_values * 2 == 23_040


def test_published_counts() -> None:
    """Qwen2.5-0.5B (biases on q, k, v): 494,032,768. GPT-2: 124,439,808. Untied: one matrix more."""
    assert shape_of(QWEN).parameters == 494_032_768
    assert shape_of(GPT2).parameters == 124_439_808
    assert shape_of({**SMOL, "tie_word_embeddings": False}).parameters == 134_515_008 + 28_311_552


def test_a_mixture_of_experts() -> None:
    """Four experts of SmolLM2's MLP, two at work: a layer's MLP 4 times, and a router of 576·4; of the
    matrices a token meets half of the experts. It is no family that is counted exactly."""
    dense, mixed = shape_of(SMOL), shape_of({**SMOL, "num_local_experts": 4, "num_experts_per_tok": 2})
    mlp = 3 * 576 * 1536
    assert mixed.matrices - dense.matrices == 30 * (3 * mlp + 576 * 4)
    assert mixed.active_matrices - dense.matrices == 30 * (mlp + 576 * 4)
    assert dense.known
    assert not mixed.known


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_size_that_is_missing(key: str) -> None:
    with pytest.raises(ConfigError, match=f"no usable '{key}' \\(got None\\)"):
        shape_of({k: v for k, v in SMOL.items() if k != key})


def tiny(arch: Architecture = "llama", **sizes: Any) -> Any:
    return tiny_model(40, arch=arch, hidden=32, intermediate=48, max_positions=64, **sizes)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_count_is_the_models_own(arch: Architecture, layers: int) -> None:
    model = tiny(arch, layers=layers)
    shape = shape_of(model.config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.embedding == sum(
        p.numel() for n, p in model.named_parameters() if "embed" in n or "wte" in n or "wpe" in n
    )


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("down_proj",)])
def test_an_adapter_is_counted_as_peft_makes_it(targets: Any) -> None:
    model = tiny()
    names = targets if isinstance(targets, str) else list(targets)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    wanted = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert lora_parameters(shape_of(model.config.to_dict()), 4, targets) == wanted


def kept(layers: int, dtype: torch.dtype) -> float:
    """Bytes a token that autograd keeps of a pass, weights aside."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), hidden=64, layers=layers, heads=4, kv_heads=2, intermediate=160).to(
        dtype
    )
    policy = Policy(model, tokenizer, mode="packed")
    samples, seen = random_samples(6, groups=6, shared=0), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.logprobs(samples)
    size = sum(n for where, (n, _) in seen.items() if where not in weights)
    assert scores.logprobs.requires_grad
    return size / (scores.tokens_computed + -scores.tokens_computed % FILL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps(dtype: torch.dtype) -> None:
    """Three layers less two: one. What the formula leaves out is a few numbers a head."""
    shape = shape_of(tiny_model(40, hidden=64, heads=4, kv_heads=2, intermediate=160).config.to_dict())
    one = kept(3, dtype) - kept(2, dtype)
    assert one == pytest.approx(saved_bytes(shape, dtype.itemsize), rel=0.05)


def test_what_a_layer_keeps_of_smollm2() -> None:
    """6 · 576 + 2 · 192 + 2 · 1536 = 6,912 numbers: 27,648 bytes in float32, 13,824 in bfloat16."""
    assert saved_bytes(shape_of(SMOL), 4) == 27_648
    assert saved_bytes(shape_of(SMOL), 2) == 13_824


def test_operations() -> None:
    """Two for each weight of the matrices (30 · 3,538,944) and of the head; 4·30·576 for each token seen."""
    body = 2 * 30 * 3_538_944
    assert forward_flops(shape_of(SMOL), 0, head=False) == body
    assert forward_flops(shape_of(SMOL), 100) == body + 2 * 28_311_552 + 4 * 30 * 576 * 100
