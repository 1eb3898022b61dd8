"""Models whose attention is not plain SDPA: what the policy trains is the model as it was loaded."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from spine import random_samples
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma2Config, GptOssConfig, SmolLM3Config

from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.policies.fast.attention import NAME
from stepladder.policies.policy import Policy

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


def made(kind: str) -> Any:
    config = {
        # values of 8 numbers, queries and keys of 12
        "deepseek_v3": lambda: DeepseekV3Config(
            **SIZES, **EXPERTS, **MLA, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
        ),
        # a learnt number in the denominator of each head's softmax
        "gpt_oss": lambda: GptOssConfig(
            **SIZES,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["full_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        # the second layer does not rotate
        "smollm3": lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
        # scores capped by a tanh
        "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8),
    }[kind]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("deepseek_v3", "packed"), ("smollm3", "packed"), ("gpt_oss", "padded"), ("gemma2", "full")],
)
def test_log_probabilities_and_gradients_are_the_models_own(
    kind: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(kind)
    own = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "stepladder"):
        policy = Policy(model, tiny_tokenizer())
    assert policy.mode == mode
    assert ("computes what SDPA does not" in caplog.text) == (mode != "packed")
    samples = random_samples(4)
    scores = policy.logprobs(samples).logprobs
    scores.sum().backward()
    expected = torch.zeros(())
    for b, one in enumerate(samples):
        ids = torch.tensor(one.token_ids)
        table = own(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = table.gather(1, ids[1:, None])[:, 0] * torch.tensor(one.mask[1:])
        torch.testing.assert_close(scores[b, 1 : len(ids)], chosen, rtol=0, atol=1e-4)
        expected = expected + chosen.sum()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), own.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        got = torch.zeros_like(p) if p.grad is None else p.grad
        assert float((got - wanted).norm()) <= 1e-3 * float(wanted.norm()) + 1e-6, name


def test_a_model_loaded_with_eager_attention_is_packed_where_that_is_the_same() -> None:
    from stepladder.policies.tiny import tiny_model

    model = tiny_model(len(tiny_tokenizer()), hidden=32, layers=2, intermediate=48)
    model.set_attn_implementation("eager")
    policy = Policy(model, tiny_tokenizer())
    assert policy.mode == "packed"
    assert policy.lm.config._attn_implementation == NAME


def test_a_copy_keeps_its_attention() -> None:
    """As a critic's trunk and a reference are made."""
    policy = Policy(made("gpt_oss"), tiny_tokenizer())
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer, mode=policy.mode)
    samples = random_samples(3)
    with torch.no_grad():
        assert torch.equal(other.logprobs(samples).logprobs, policy.logprobs(samples).logprobs)
