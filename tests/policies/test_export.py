"""Exports open in plain transformers and peft; fault 112 (tied weights) and the merged adapter."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepladder.errors import CheckpointError
from stepladder.policies.export import export_model
from stepladder.policies.pretrained import load_model
from stepladder.policies.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from policy_helpers import TEMPLATE, word_tokenizer

IDS = torch.tensor([[4, 5, 6, 7, 8]])


def _keys(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def _adapted(seed: int = 0) -> PeftModel:
    model = get_peft_model(
        tiny_model(32, layers=2, seed=seed),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start: an adapter that does nothing proves nothing
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_tied_weights_are_stored_once_and_logits_come_back(tmp_path: Path, arch: str) -> None:
    model = tiny_model(32, layers=2, arch=arch)
    export_model(model, word_tokenizer(), tmp_path / "m")
    assert not [key for key in _keys(tmp_path / "m" / "model.safetensors") if "lm_head" in key]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert back.get_input_embeddings().weight is back.get_output_embeddings().weight
    assert torch.equal(back(IDS).logits, model(IDS).logits)


def test_untied_heads_are_both_stored(tmp_path: Path) -> None:
    model = tiny_model(32, layers=2)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    export_model(model, word_tokenizer(), tmp_path / "m")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.equal(back(IDS).logits, model(IDS).logits)


def test_tokenizer_template_and_stop_ids_travel_along(tmp_path: Path) -> None:
    export_model(tiny_model(32, layers=1), word_tokenizer(), tmp_path / "m", stop_token_ids=(3, 2))
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == TEMPLATE
    config = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [3, 2]
    assert "temperature" not in config


def test_without_stop_ids_the_tokenizers_end_is_used(tmp_path: Path) -> None:
    export_model(tiny_model(32, layers=1), word_tokenizer(), tmp_path / "m")
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_merged_adapter_is_a_plain_model_and_training_weights_stay(tmp_path: Path) -> None:
    model = _adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(IDS).logits
    export_model(model, word_tokenizer(), tmp_path / "m", merged=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not [key for key in _keys(tmp_path / "m" / "model.safetensors") if "lora" in key]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    torch.testing.assert_close(back(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_adapter_alone_and_load_model_merges_it(tmp_path: Path) -> None:
    export_model(tiny_model(32, layers=2), word_tokenizer(), tmp_path / "base")
    model = _adapted()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    export_model(model, word_tokenizer(), tmp_path / "a")
    assert not (tmp_path / "a" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain_peft = PeftModel.from_pretrained(base, str(tmp_path / "a")).eval()
    torch.testing.assert_close(plain_peft(IDS).logits, model(IDS).logits)
    loaded, tokenizer = load_model(str(tmp_path / "a"), dtype="float32", device="cpu")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.chat_template == TEMPLATE


def test_an_export_is_replaced_but_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "m"
    export_model(tiny_model(32, layers=1), word_tokenizer(), path)
    export_model(tiny_model(32, layers=2), word_tokenizer(), path)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="holds no exported model"):
        export_model(tiny_model(32, layers=1), word_tokenizer(), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").exists()


def test_an_adapter_of_a_base_that_lies_nowhere_is_exported_merged(tmp_path: Path) -> None:
    """A model made from scratch has no name: its adapter alone could not be loaded again."""
    model = _adapted()
    expected = model(IDS).logits
    export_model(model, word_tokenizer(), tmp_path / "m")
    assert not (tmp_path / "m" / "adapter_config.json").exists()
    back, _ = load_model(str(tmp_path / "m"), dtype="float32", device="cpu")
    torch.testing.assert_close(back(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_shared_embeddings_can_be_written_apart(tmp_path: Path) -> None:
    """For a server that cannot load new weights into shared ones: same numbers, two tensors."""

    from safetensors.torch import load_file
    from spine import tiny_policy

    policy = tiny_policy()
    export_model(policy.model, policy.tokenizer, tmp_path / "m", untied=True)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
    head = load_file(tmp_path / "m" / "model-head.safetensors")
    assert torch.equal(head["lm_head.weight"], policy.lm.get_input_embeddings().weight)
    assert policy.lm.config.tie_word_embeddings is True  # the policy itself stays as it was
