"""Paths and weights: what is fused, what falls back and says so, LoRA, and the last resort."""

from __future__ import annotations

import asyncio
import logging

import peft
import pytest
import torch
from engine_models import COMMON, SMALL, assert_greedy, assert_logprobs, generate_all, prompt, tiny
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from stepladder.engines.local import fused as fused_module
from stepladder.engines.local.engine import LocalEngine
from stepladder.engines.local.packing import OneDnnLinear, PlainLinear, linear_class
from stepladder.errors import ConfigError
from stepladder.types import Sampling

# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
GREEDY = Sampling(temperature=0.0, max_tokens=6)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def shaken(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def with_lora(kind: str = "llama"):
    """A LoRA model whose adapters do something: B is not zero."""
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1
    )
    model = get_peft_model(tiny(kind), config)
    step_lora(model, 0)
    return model.eval()


def step_lora(model, seed: int) -> None:
    """What an optimiser step does: the adapters change in place."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


async def check(engine: LocalEngine, model) -> None:
    prompts = [prompt(n, n) for n in (4, 11, 11)]
    for ids, out in zip(prompts, await generate_all(engine, prompts, [GREEDY] * 3), strict=True):
        assert_greedy(model, ids, out, 6)


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, **SMALL, use_sliding_window=False)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **SMALL, attention_bias=True, mlp_bias=True)),
    "wide heads": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **SMALL, head_dim=24)),
    "llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, **SMALL, rope_parameters=ROPE)),
    "one head": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, **{**SMALL, "num_attention_heads": 1, "num_key_value_heads": 1})
    ),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_variants(variant: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with oneDNN's operators where they work, and with their stand-in."""
    if plain:
        monkeypatch.setattr(fused_module, "linear_class", lambda device, dtype: PlainLinear)
    model = shaken(VARIANTS[variant]())

    async def main() -> None:
        engine = LocalEngine(model, fused=True)
        assert engine.path == "fused"
        await check(engine, model)
        await engine.close()

    run(main())


def test_linear_class_is_chosen_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_class(torch.device("cuda"), torch.float32) is PlainLinear
    assert linear_class(torch.device("cpu"), torch.float16) is PlainLinear

    def absent(self, weight, bias):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(OneDnnLinear, "__init__", absent)
    assert linear_class(torch.device("cpu"), torch.float32) is PlainLinear


def test_wrong_kernels_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneDnnLinear, "mul", lambda self, x, other: self(x))
    assert linear_class(torch.device("cpu"), torch.float32) is PlainLinear


def test_a_llama_that_is_none_takes_the_default_path_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """The name is on the list, but the module was changed: the probe finds it."""
    model = tiny("llama")
    model.model.layers[1].self_attn.scaling *= 1.5

    async def main() -> None:
        engine = LocalEngine(model)
        assert engine.path == "default"
        assert "takes the default path" in caplog.text
        assert "log-probabilities differ" in caplog.text
        await check(engine, model)
        await engine.close()

    run(main())


def test_fused_true_is_an_order() -> None:
    with pytest.raises(ConfigError, match=r"gemma3_text is not one of llama, qwen2, qwen3; use 'auto'"):
        LocalEngine(tiny("gemma3"), fused=True)
    with pytest.raises(ConfigError, match="dtype must be"):
        LocalEngine(tiny("llama"), dtype="int32")
    with pytest.raises(ConfigError, match="max_rows"):
        LocalEngine(tiny("llama"), max_rows=0)


@pytest.mark.parametrize("fused", [True, False])
def test_lora_acts_and_the_base_keeps_its_bytes_over_ten_syncs(fused: bool) -> None:
    model = with_lora()
    base = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n}

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        assert engine.path == ("fused" if fused else "default")
        seen = set()
        for version in range(1, 11):
            step_lora(model, version)
            engine.sync(version)
            seen.add(engine.weights_fingerprint())
            out = (await generate_all(engine, [prompt(9, 1)], [GREEDY]))[0]
            assert out.versions == ((version, 6),)
            assert_logprobs(model, prompt(9, 1), out)
        assert len(seen) == 10
        with model.disable_adapter():
            engine.sync(11)
            await check(engine, model)
        await engine.close()

    run(main())
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)


def test_lora_on_attention_biases_and_merged_adapters() -> None:
    model = with_lora("qwen3")

    async def main() -> None:
        engine = LocalEngine(model, fused=True)
        await check(engine, model)
        model.merge_adapter()
        engine.sync(1)
        await check(engine, model)
        model.unmerge_adapter()
        await engine.close()

    run(main())


def test_dora_takes_the_default_path() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    model = get_peft_model(tiny("llama"), config).eval()
    step_lora(model, 0)

    async def main() -> None:
        engine = LocalEngine(model)
        assert engine.path == "default"
        await check(engine, model)
        await engine.close()

    run(main())
    with pytest.raises(ConfigError, match="its adapter uses DoRA"):
        LocalEngine(model, fused=True)


def test_prompt_learning_adapters_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ConfigError, match="virtual tokens; use LoRA"):
        LocalEngine(get_peft_model(tiny("llama"), config))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_fused_path_sees_an_update_only_at_a_sync(dtype: str | None) -> None:
    """Known fault 59: a kept cast of the head would go on giving the old numbers after the sync."""
    model = tiny("llama")
    ids = prompt(9, 1)

    async def main() -> None:
        engine = LocalEngine(model, fused=True, dtype=dtype)
        first, mark = engine.token_logprobs(ids), engine.weights_fingerprint()
        with torch.no_grad():
            model.lm_head.weight[ids[4]] *= 2.0
        assert (engine.token_logprobs(ids), engine.weights_fingerprint()) == (first, mark)
        engine.sync(1)
        second = engine.token_logprobs(ids)
        assert abs(second[3] - first[3]) > 1e-3
        assert engine.weights_fingerprint() != mark
        await engine.close()

    run(main())


def test_a_private_engine_sees_an_update_only_at_a_sync_on_every_path() -> None:
    """GPT-2 takes the default path, which otherwise runs the policy's own modules."""
    model = tiny("gpt2")

    async def main() -> None:
        engine = LocalEngine(model, private=True)
        assert engine.path == "default"
        ids = list(prompt(12, 3))
        before, hash_before = engine.token_logprobs(ids), engine.weights_fingerprint()
        shaken(model)
        assert engine.token_logprobs(ids) == before
        assert engine.weights_fingerprint() == hash_before
        engine.sync(1)
        assert engine.token_logprobs(ids) != before
        assert engine.weights_fingerprint() != hash_before
        await engine.close()

    run(main())


def test_auto_dtype_is_resolved_to_a_type_of_the_machine() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model, dtype="auto")
        assert engine.dtype in (torch.float32, torch.bfloat16)
        out = (await generate_all(engine, [prompt(9, 1)], [GREEDY]))[0]
        assert_logprobs(model, prompt(9, 1), out, within=0.5)
        await engine.close()

    run(main())


def test_a_state_space_model_is_decoded_one_by_one_and_loudly(caplog: pytest.LogCaptureFixture) -> None:
    model = shaken(
        MambaForCausalLM(
            MambaConfig(**COMMON, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)
        )
    )

    async def main() -> None:
        engine = LocalEngine(model)
        assert engine.path == "plain"
        assert "one sequence at a time" in caplog.text
        await check(engine, model)
        with engine.session("a") as session:
            ids = prompt(8, 1)
            out = await session.generate(ids, GREEDY)
            longer = [*ids, *out.token_ids, 5, 6]
            assert_greedy(model, longer, await session.generate(longer, GREEDY), 6)
        siblings = [Sampling(max_tokens=3 + seed, seed=seed) for seed in range(5)]
        for out in await generate_all(engine, [prompt(7, 2)] * 5, siblings):
            assert_logprobs(model, prompt(7, 2), out)
        await engine.close()

    caplog.set_level(logging.WARNING)
    run(main())
