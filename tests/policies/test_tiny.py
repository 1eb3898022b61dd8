"""Tiny models: seeded, small, and without a trace in the global random state."""

import random

import numpy as np
import pytest
import torch

from stepladder.errors import ConfigError
from stepladder.policies.tiny import tiny_model

ARCHITECTURES = ["llama", "qwen3", "gemma3", "gpt2"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_forward_shapes_and_size(arch: str) -> None:
    model = tiny_model(64, arch=arch)
    ids = torch.arange(40).unsqueeze(0)  # longer than Gemma's window of 32
    logits = model(ids).logits
    assert logits.shape == (1, 40, 64)
    assert torch.isfinite(logits).all()
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 5e6
    assert not model.training
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_weights_depend_on_the_seed_alone(arch: str) -> None:
    torch.manual_seed(1)
    a = tiny_model(64, arch=arch, seed=3).state_dict()
    torch.manual_seed(2)
    b = tiny_model(64, arch=arch, seed=3).state_dict()
    c = tiny_model(64, arch=arch, seed=4).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_global_random_states_stay() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    tiny_model(64, seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_gemma_has_both_kinds_of_layers() -> None:
    config = tiny_model(64, arch="gemma3").config
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.sliding_window == 32


def test_bad_arguments_are_explained() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama'"):
        tiny_model(64, arch="lama")
    with pytest.raises(ConfigError, match="hidden=128, heads=4, kv_heads=2 works"):
        tiny_model(64, hidden=100, heads=3)
