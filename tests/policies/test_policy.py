"""The policy as something that scores tokens: which layout is exact, temperature, dropout, empty batches."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from spine import SIZES, alone, gradients, random_samples, sample, tiny_policy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from stepladder.data.batching import Block
from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.errors import ConfigError
from stepladder.policies.policy import Policy
from stepladder.types import ImagePart

ALL = ("llama", "qwen3", "gpt2", "gemma3")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2"])
def test_full_attention_is_packed_in_silence(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny_policy(arch).mode == "packed"  # type: ignore[arg-type]
    assert not caplog.records


def test_a_sliding_window_turns_packing_off_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stepladder"):
        assert tiny_policy("gemma3").mode == "padded"
    assert "packing and shared prefixes are off for this model (gemma3_text)" in caplog.text


def test_a_layout_that_is_wrong_for_the_model_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The probe measures: with an attention that ignores the blocks, the packed layout is refused."""
    from stepladder.policies.fast import attention

    honest = attention.tiling
    monkeypatch.setattr(
        attention, "tiling", lambda blocks, prefix, length: honest([Block(0, length, None)], 0, length)
    )
    with caplog.at_level(logging.WARNING, "stepladder"):
        assert tiny_policy("llama").mode == "padded"
    assert "the packed layout is off by" in caplog.text


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("mode", ["padded", "full"])
def test_the_other_layouts_are_exact_too(arch: str, mode: str) -> None:
    policy = tiny_policy(arch, mode=mode)  # type: ignore[arg-type]
    samples = random_samples(5, shared=40)  # longer than Gemma's window of 32
    with torch.no_grad():
        scores = policy.logprobs(samples, temperature=1.3)
        for b, one in enumerate(samples):
            torch.testing.assert_close(
                scores.logprobs[b][scores.mask[b]], alone(policy, one, 1.3), rtol=0, atol=2e-5
            )


@pytest.mark.parametrize("mode", ["packed", "padded", "full"])
def test_entropy_is_that_of_the_tempered_distribution(mode: str) -> None:
    policy = tiny_policy(mode=mode)  # type: ignore[arg-type]
    one = sample([20, 21, 22, 23], 2)
    with torch.no_grad():
        got = policy.logprobs([one], temperature=2.0).entropy[0]
        table = (policy.lm(input_ids=torch.tensor([one.token_ids])).logits[0] / 2.0).log_softmax(-1)
    expected = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(got[2:], expected[1:3], rtol=0, atol=1e-5)
    assert got[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_scores_nothing_is_refused(policy: Policy, temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"Try 1\.0"):
        policy.logprobs([sample([20, 21], 1)], temperature=temperature)


def test_dropout_is_off_whatever_the_model_came_with() -> None:
    """Two passes give the same bits, even if somebody calls train()."""
    vocabulary = len(tiny_tokenizer())
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.5,
            embd_pdrop=0.5,
            attn_pdrop=0.5,
        )
    )
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.5,
        )
    )
    for model in (gpt2, llama):
        policy = Policy(model.train(), tiny_tokenizer())
        model.train()
        samples = random_samples(3)
        with torch.no_grad():
            first, second = policy.logprobs(samples).logprobs, policy.logprobs(samples).logprobs
        assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["packed", "padded", "full"])
def test_nothing_to_train_is_a_zero_with_a_gradient(mode: str) -> None:
    """Fault 32: an all-masked batch gives 0, connected to the graph, with gradients of 0."""
    policy = tiny_policy(mode=mode)  # type: ignore[arg-type]
    scores = policy.logprobs([sample([20, 21, 22], 3), sample([20, 21], 2)])
    assert not scores.mask.any()
    scores.logprobs.sum().backward()
    assert all(not g.any() for g in gradients(policy).values())


def test_embeddings_can_be_frozen(policy: Policy) -> None:
    before = len(policy.trainable())
    policy.freeze_embeddings()
    assert len(policy.trainable()) == before - 1  # tied: one tensor
    assert not any("embed" in name for name in policy.trainable())
    policy.logprobs(random_samples(3)).logprobs.sum().backward()
    assert policy.lm.get_input_embeddings().weight.grad is None


def test_an_adapter_is_packed_and_alone_gets_gradients() -> None:
    base = tiny_policy()
    torch.manual_seed(0)
    model = get_peft_model(base.lm, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # a fresh adapter adds nothing
    policy = Policy(model, base.tokenizer)
    assert policy.mode == "packed"
    assert policy.trainable()
    assert all("lora" in name for name in policy.trainable())
    samples = random_samples(4)
    scores = policy.logprobs(samples)
    for b, one in enumerate(samples):
        torch.testing.assert_close(scores.logprobs[b][scores.mask[b]], alone(policy, one), rtol=0, atol=2e-5)
    scores.logprobs.sum().backward()
    assert all(g.abs().sum() > 0 for g in gradients(policy).values())


def test_bf16_is_scored_in_fp32() -> None:
    policy = tiny_policy(dtype=torch.bfloat16, scale=0.02)
    assert policy.mode == "packed"
    scores = policy.logprobs(random_samples(3))
    assert scores.logprobs.dtype == torch.float32
    assert SIZES["hidden"] == policy.lm.config.hidden_size


@pytest.mark.model
def test_the_real_model_is_packed_and_exact(real_policy: Policy) -> None:
    assert real_policy.mode == "packed"
    samples = random_samples(4, vocabulary=49_000)
    with torch.no_grad():
        scores = real_policy.logprobs(samples)
        for b, one in enumerate(samples):
            torch.testing.assert_close(
                scores.logprobs[b][scores.mask[b]], alone(real_policy, one), rtol=0, atol=1e-4
            )


def test_an_adapter_on_the_output_layer_is_trained_and_scored() -> None:
    """Its weight alone would be the base model's, and the adapter would get no gradient."""
    vocabulary = len(tiny_tokenizer())
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=False,
        )
    )
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    policy = Policy(get_peft_model(lm, config), tiny_tokenizer())
    policy.logprobs(random_samples(2)).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.1)
        (one,) = random_samples(1)
        scores = policy.logprobs([one])
        torch.testing.assert_close(scores.logprobs[scores.mask], alone(policy, one), rtol=0, atol=1e-5)


def test_the_bias_of_an_output_layer_is_trained() -> None:
    """At first it is 0, which no probe of values can tell from none."""
    from transformers import PhiConfig, PhiForCausalLM

    lm = PhiForCausalLM(
        PhiConfig(
            vocab_size=len(tiny_tokenizer()),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    policy = Policy(lm, tiny_tokenizer())
    assert policy.mode == "packed"
    policy.logprobs(random_samples(2)).logprobs.sum().backward()
    assert lm.lm_head.bias.grad is not None
    assert float(lm.lm_head.bias.grad.abs().sum()) > 0


def test_samples_with_images_are_refused(policy: Policy) -> None:
    one = dataclasses.replace(sample([20, 21, 22], 1), images=(ImagePart("file:cat.png"),))
    with pytest.raises(ConfigError, match="1 image"):
        policy.logprobs([one])
    with pytest.raises(ConfigError, match="1 image"):
        policy.hidden_at([one], [[1]])
