"""A reward model saved, reloaded, merged, and opened by transformers and PEFT gives equal scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from spine import random_samples, tiny_policy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from stepladder.errors import CheckpointError
from stepladder.policies.heads import ScalarHead, ScoredModel
from stepladder.policies.policy import Policy
from stepladder.policies.reward_folder import RewardInfo, pad_for_scoring, save_scored
from stepladder.policies.scored import load_scored

INFO = RewardInfo("outcome", 1.5, 2.0, (7,), "\n", {"accuracy": 0.9}, ((0.55, 0.6, 10),))


def scored(arch: str = "llama") -> ScoredModel:
    policy = tiny_policy(arch)  # type: ignore[arg-type]
    return ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))


def adapted(base: Path) -> ScoredModel:
    """LoRA whose weights are not the zeros they begin with, on a base saved at `base`."""
    policy = tiny_policy()
    policy.lm.save_pretrained(base)
    policy.tokenizer.save_pretrained(base)
    policy.lm.name_or_path = str(base)
    policy.lm.config._name_or_path = str(base)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    network: Any = get_peft_model(policy.lm, config)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    policy = Policy(network, policy.tokenizer)
    return ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))


def scores(model: ScoredModel) -> torch.Tensor:
    with torch.no_grad():
        found = model.sequence_scores(random_samples(5))
    assert found.std() > 0.1
    return found


def padded_both_ways(model: Any, pad: int, *, tolerance: float = 1e-5) -> torch.Tensor:
    """Scores by transformers' class: alone, padded on the left and on the right, which are equal."""
    samples = random_samples(5)
    width = max(len(s.token_ids) for s in samples) + 3
    rows: dict[str, list[torch.Tensor]] = {"left": [], "right": []}
    masks: dict[str, list[torch.Tensor]] = {"left": [], "right": []}
    alone = []
    with torch.no_grad():
        for s in samples:
            ids, fill = torch.tensor(s.token_ids), torch.full((width - len(s.token_ids),), pad)
            one, none = torch.ones_like(ids), torch.zeros_like(fill)
            for side, order in (("left", (fill, ids, none, one)), ("right", (ids, fill, one, none))):
                rows[side].append(torch.cat(order[:2]))
                masks[side].append(torch.cat(order[2:]))
            alone.append(model(ids[None], attention_mask=one[None]).logits[0, 0])
        for side in rows:
            mask = torch.stack(masks[side])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            found = model(torch.stack(rows[side]), attention_mask=mask, position_ids=positions).logits[:, 0]
            torch.testing.assert_close(found, torch.stack(alone), rtol=tolerance, atol=tolerance)
    return torch.stack(alone)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gemma3"])
def test_fault_79_saved_and_reloaded_scores_are_equal(tmp_path: Path, arch: str) -> None:
    model = scored(arch)
    save_scored(model, tmp_path / "rm", INFO)
    again, info = load_scored(tmp_path / "rm", dtype="float32", device="cpu")
    assert torch.equal(scores(again), scores(model))
    assert info == INFO


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gemma3"])
def test_transformers_opens_it_with_equal_scores_whatever_the_padding(tmp_path: Path, arch: str) -> None:
    model = scored(arch)
    save_scored(model, tmp_path / "rm", INFO)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert theirs.config.num_labels == 1
    assert tokenizer.pad_token_id == theirs.config.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    found = padded_both_ways(theirs, tokenizer.pad_token_id)
    torch.testing.assert_close(found, scores(model), rtol=1e-5, atol=1e-5)


def test_an_adapter_goes_out_and_in_with_its_head_and_merges_to_equal_scores(tmp_path: Path) -> None:
    model = adapted(tmp_path / "base")
    save_scored(model, tmp_path / "rm", INFO)
    config = json.loads((tmp_path / "rm" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert not (tmp_path / "rm" / "config.json").exists()
    again, _ = load_scored(tmp_path / "rm", dtype="float32", device="cpu")
    assert torch.equal(scores(again), scores(model))
    save_scored(again, tmp_path / "merged", INFO, merged=True)
    merged, _ = load_scored(tmp_path / "merged", dtype="float32", device="cpu")
    torch.testing.assert_close(scores(merged), scores(model), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores(again), scores(model)), "the merge works on a copy"


def test_peft_opens_the_adapter_with_equal_scores(tmp_path: Path) -> None:
    model = adapted(tmp_path / "base")
    save_scored(model, tmp_path / "rm", INFO)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    pad = AutoTokenizer.from_pretrained(tmp_path / "rm").pad_token_id
    base.config.pad_token_id = pad
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "rm")).eval()
    torch.testing.assert_close(padded_both_ways(theirs, pad), scores(model), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_pefts_own_is_read_with_its_head(tmp_path: Path) -> None:
    adapted(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")  # keeps the head by itself
    theirs: Any = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name or name.endswith("score.modules_to_save.default.weight"):
                p.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "theirs")
    ours, info = load_scored(tmp_path / "theirs", dtype="float32", device="cpu")
    with torch.no_grad():
        wanted = torch.stack([theirs(torch.tensor([s.token_ids])).logits[0, 0] for s in random_samples(5)])
    torch.testing.assert_close(scores(ours), wanted, rtol=1e-5, atol=1e-5)
    assert info == RewardInfo()


def test_fault_79_a_model_without_its_head_is_refused(tmp_path: Path) -> None:
    save_scored(adapted(tmp_path / "base"), tmp_path / "adapter", INFO)
    save_scored(scored(), tmp_path / "whole", INFO)
    for folder, name in (("adapter", "adapter_model.safetensors"), ("whole", "model.safetensors")):
        file = tmp_path / folder / name
        tensors = load_file(file)
        save_file({k: t for k, t in tensors.items() if "score" not in k}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"no tensor score.weight.*random"):
            load_scored(tmp_path / folder, device="cpu")
    with pytest.raises(CheckpointError, match=r"no tensor score.weight"):
        load_scored(tmp_path / "base", device="cpu")  # a language model is no reward model


def test_missing_body_weights_and_heads_of_several_labels_are_refused(tmp_path: Path) -> None:
    save_scored(scored(), tmp_path / "rm", INFO)
    file = tmp_path / "rm" / "model.safetensors"
    tensors = load_file(file)
    gone = next(k for k in tensors if "mlp" in k)
    save_file({k: t for k, t in tensors.items() if k != gone}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks 1 weights of its body, such as {gone}"):
        load_scored(tmp_path / "rm", device="cpu")
    save_file({**tensors, "score.weight": torch.zeros(3, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shape \(3, 32\).*one output"):
        load_scored(tmp_path / "rm", device="cpu")


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no reward model"):
        save_scored(scored(), tmp_path / "rm", INFO)
    assert (tmp_path / "rm" / "mine.txt").read_text() == "mine"


def test_an_architecture_without_such_a_class_keeps_its_head_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    model = scored()
    save_scored(model, tmp_path / "rm", INFO)
    assert (tmp_path / "rm" / "score.safetensors").is_file()
    again, _ = load_scored(tmp_path / "rm", dtype="float32", device="cpu")
    assert torch.equal(scores(again), scores(model))


def test_padding_is_never_the_end_of_a_turn() -> None:
    tokenizer = tiny_policy().tokenizer
    tokenizer.pad_token = tokenizer.eos_token  # as in GPT-2, Llama and SmolLM2
    assert pad_for_scoring(tokenizer) == tokenizer.unk_token_id
