"""Reward models read back from their folders, ready to score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepladder.errors import CheckpointError
from stepladder.policies.dropout import zero_dropout
from stepladder.policies.heads import ScalarHead, ScoredModel, freeze_output_layer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import (
    DType,
    load_config,
    load_model,
    pick_device,
    pick_dtype,
    resolve_model,
    tokenizer_in,
)
from stepladder.policies.quiet import no_progress_bars
from stepladder.policies.reward_folder import ADAPTER, RewardInfo
from stepladder.policies.tensors import load_tensors


def load_scored(
    name: str | Path, *, dtype: DType = "auto", device: str = "auto"
) -> tuple[ScoredModel, RewardInfo]:
    """A reward model from a folder (ours, transformers' or PEFT's), a bundled name or a hub id.

    Raises CheckpointError where it has no head, or where weights are missing; else like `load_model`.
    """
    folder = resolve_model(str(name))
    adapted = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    weights = load_tensors(folder / ADAPTER) if adapted else _head_weights(folder)
    head = _head(weights, folder)
    with no_progress_bars(), _quiet(), torch.random.fork_rng(devices=[]):
        if adapted:
            network = _load_adapter(folder, weights, dtype=dtype, device=device)
        else:
            network = _load_body(folder, dtype=dtype, device=device)
    policy = Policy(network, tokenizer_in(folder))
    freeze_output_layer(policy)
    return ScoredModel(policy, head=head), RewardInfo.read(folder)


def _head_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors named `score...` of a whole model: one file, several, or beside the model."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith("score")}  # noqa: SIM118
    return found


def _head(weights: Mapping[str, Tensor], folder: Path) -> ScalarHead:
    # peft writes a saved module under its own name, or under modules_to_save.ADAPTER
    found = {k: t for k, t in weights.items() if k.endswith(".weight") and "score" in k.split(".")}
    if len(found) != 1:
        has = f"several tensors {', '.join(found)}" if found else "no tensor score.weight"
        raise CheckpointError(
            f"{folder} is no reward model: it has {has}, and a head made up while loading would give random "
            "rewards. Give the folder reward_model/ of a run, or a sequence classification model with one "
            "label; an adapter must have been trained with modules_to_save=['score']"
        )
    weight = next(iter(found.values()))
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise CheckpointError(
            f"the head in {folder} has shape {tuple(weight.shape)}; a reward model has one output, [1, d]"
        )
    if any(k.endswith(".bias") and "score" in k.split(".") for k in weights):
        raise CheckpointError(f"the head in {folder} has a bias, which this version does not read")
    head = ScalarHead(weight.shape[1])
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def _load_body(folder: Path, *, dtype: DType, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    where = pick_device(device)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=load_config(folder),
        dtype=pick_dtype(dtype, where),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    network, report = loaded
    body = f"{network.base_model_prefix}."
    missing = sorted(key for key in report["missing_keys"] if key.startswith(body))
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of its body, such as {missing[0]}")
    return _ready(network, where)


def _load_adapter(folder: Path, weights: Mapping[str, Tensor], *, dtype: DType, device: str) -> Any:
    """The adapter on its base, a causal LM; merging is left to whoever wants it."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    config: Any = PeftConfig.from_pretrained(str(folder))
    base, _ = load_model(config.base_model_name_or_path, dtype=dtype, device=device)
    config.task_type, config.modules_to_save, config.inference_mode = "CAUSAL_LM", None, False
    network: Any = get_peft_model(base, config)
    body = {k: t for k, t in weights.items() if "score" not in k.split(".")}
    report: Any = set_peft_model_state_dict(network, body)
    missing = sorted(k for k in report.missing_keys if "lora_" in k)
    if missing or report.unexpected_keys:
        name = missing[0] if missing else sorted(report.unexpected_keys)[0]
        raise CheckpointError(
            f"the adapter in {folder} does not fit its base {config.base_model_name_or_path!r}: "
            f"{'it lacks' if missing else 'the base has no place for'} {name}"
        )
    return _ready(network, str(next(base.parameters()).device))


def _ready(network: nn.Module, device: str) -> nn.Module:
    zero_dropout(network)
    network.to(torch.device(device))
    return network.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers would warn of an output layer that a scoring model neither has nor needs."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
