"""Tiny random models of four shapes, and transformers' own generation to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stepladder.engines.local.engine import LocalEngine
from stepladder.types import Generation, Sampling

VOCABULARY = 300
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    """A random model with confident predictions and no weight (norms and biases too) at its default."""
    torch.manual_seed(seed)
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**COMMON, **SMALL, tie_word_embeddings=True))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, **SMALL, head_dim=16, attention_bias=True))
    elif kind == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(
            **COMMON, **SMALL, head_dim=8, sliding_window=6, layer_types=layers, query_pre_attn_scalar=8
        )
        model = Gemma3ForCausalLM(config)
    elif kind == "gpt2":
        config = GPT2Config(**COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=256)
        model = GPT2LMHeadModel(config)
    else:
        raise ValueError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if parameter.dim() > 1 and "embed" not in name and "wpe" not in name else 0.25
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


CASES = [  # (kind, fused path)
    ("llama", True),
    ("llama", False),
    ("qwen3", True),
    ("qwen3", False),
    ("gemma3", False),
    ("gpt2", False),
]


def reference_logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) - 1, V] by one plain forward pass, no cache, no padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1)


def own_greedy(
    model: PreTrainedModel, prompt: Sequence[int], count: int, stop: int | None = None
) -> list[int]:
    """What `generate` gives, greedy, for one prompt alone."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def assert_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    out: Generation,
    temperature: float = 1.0,
    within: float = 1e-4,
) -> None:
    """Each stored log-probability is the model's own for that token after that prefix."""
    ids = [*prompt, *out.token_ids]
    own = reference_logprobs(model, ids, temperature or 1.0)[len(prompt) - 1 :]
    chosen = own.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(out.logprobs), chosen, rtol=0, atol=within)


def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], out: Generation, count: int) -> None:
    """Every token is the model's own first choice after that prefix: greedy decoding, by induction."""
    own = reference_logprobs(model, [*prompt, *out.token_ids])[len(prompt) - 1 :]
    assert own.argmax(-1).tolist() == list(out.token_ids)
    assert len(out.token_ids) == count
    assert_logprobs(model, prompt, out)


def prompt(length: int, seed: int) -> list[int]:
    """Random ids, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


async def generate_all(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[Generation]:
    """One session each, all started in one tick."""
    sessions = [engine.session(f"{i:04d}") for i in range(len(prompts))]

    async def one(i: int) -> Generation:
        with sessions[i] as session:
            return await session.generate(prompts[i], samplings[i])

    return await asyncio.gather(*(one(i) for i in range(len(prompts))))
