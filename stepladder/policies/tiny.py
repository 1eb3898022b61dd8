"""Tiny random models from transformers' own classes: for tests, and for worlds learnt from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from stepladder.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Architecture: TypeAlias = Literal["llama", "qwen3", "gemma3", "gpt2"]


def tiny_model(
    vocab_size: int,
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 352,
    max_positions: int = 512,
    seed: int = 0,
    arch: Architecture = "llama",
) -> PreTrainedModel:
    """A causal language model with random fp32 weights, in eval mode, dropout 0, embeddings tied.

    The defaults make about half a million parameters plus `vocab_size * hidden`. Weights depend on the
    arguments alone; the global random state is left as it was.

    Raises ConfigError for an unknown architecture or for sizes that do not divide.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if arch not in get_args(Architecture):
        known = ", ".join(get_args(Architecture))
        raise ConfigError(
            f"arch must be one of {known}; got {arch!r}.{nearest(arch, get_args(Architecture))}"
        )
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ConfigError(
            f"hidden must be an even multiple of heads, and heads one of kv_heads; got hidden={hidden}, "
            f"heads={heads}, kv_heads={kv_heads}. hidden=128, heads=4, kv_heads=2 works."
        )
    config = _config(arch, vocab_size, hidden, layers, heads, kv_heads, intermediate, max_positions)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _config(
    arch: Architecture,
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    max_positions: int,
) -> PretrainedConfig:
    from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

    # Ids are set by whoever owns the tokenizer; the defaults of the classes lie outside a tiny vocabulary.
    no_ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if arch == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            n_inner=intermediate,
            n_positions=max_positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **no_ids,
        )
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        **no_ids,
    }
    if arch == "llama":
        return LlamaConfig(**shape)
    if arch == "qwen3":
        return Qwen3Config(**shape)
    # Gemma 3 mixes sliding-window and global layers; a short window makes tests meet it.
    types = ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(layers)]
    return Gemma3TextConfig(
        **shape, sliding_window=32, layer_types=types, query_pre_attn_scalar=hidden // heads
    )
