"""A reward model as a folder: Hugging Face files, the head with them, and what its scores mean.

    config.json, model.safetensors      transformers' ForSequenceClassification with one label, `score.weight`
                                        in it, where the architecture has such a class; else the causal LM
                                        with the head in score.safetensors
    adapter_config.json, adapter_model.safetensors    instead, for LoRA on a named base: a PEFT adapter of
                                        the task SEQ_CLS, the head kept among its saved modules
    reward_model.json                   see `RewardInfo`

A folder without a head is refused: a head made up while loading gives random rewards and no error.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepladder.atomic import atomic_directory
from stepladder.errors import CheckpointError
from stepladder.policies.checkpoint import load_tensors, save_tensors
from stepladder.policies.dropout import zero_dropout
from stepladder.policies.heads import ScalarHead, ScoredModel, freeze_output_layer
from stepladder.policies.merging import merge
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import (
    DType,
    load_config,
    load_model,
    no_progress_bars,
    pick_device,
    pick_dtype,
    resolve_model,
    tokenizer_in,
)

INFO = "reward_model.json"
HEAD = "score.safetensors"
WEIGHT = "score.weight"
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """What `score` means. "outcome": read at the last token; "process": a logit at the end of each step.

    `mean` and `std` are those of the raw scores on the training data: (score - mean) / std is the normalised
    score. `separator` stands between the steps of a process reward model's solutions. `held_out` are the
    metrics of the kept weights on the validation data, `reliability` its calibration (see
    `training.calibration`).
    """

    kind: Literal["outcome", "process"] = "outcome"
    mean: float = 0.0
    std: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    separator: str = "\n"
    held_out: Mapping[str, float] = field(default_factory=dict)
    reliability: tuple[tuple[float, float, int], ...] = ()

    @classmethod
    def read(cls, folder: Path) -> RewardInfo:
        """From `folder`; a reward model from elsewhere, without the file, has raw scores (mean 0, std 1).

        Raises CheckpointError for a file that is none of ours.
        """
        path = folder / INFO
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
            known["stop_token_ids"] = tuple(known.get("stop_token_ids", ()))
            known["reliability"] = tuple(tuple(row) for row in known.get("reliability", ()))
            return cls(**known)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a reward model's description: {error}"
            ) from error


def save_scored(model: ScoredModel, path: Path, info: RewardInfo, *, merged: bool = False) -> Path:
    """Write `model` to `path`, whole or not at all; an earlier reward model there is replaced.

    LoRA on a base that has a name is written as a PEFT adapter, or with `merged=True` as a whole model; the
    merge works on a copy. Raises CheckpointError when `path` holds anything that is no reward model.
    """
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / INFO).is_file()):
        raise CheckpointError(f"{path} exists and holds no reward model of ours; give a new folder")
    network: Any = model.policy.model
    adapted = hasattr(network, "peft_config")
    named = adapted and all(c.base_model_name_or_path for c in network.peft_config.values())
    with atomic_directory(path) as folder:
        if adapted and named and not merged:
            _save_adapter(network, model.score, folder)
        else:
            _save_whole(merge(copy.deepcopy(network)) if adapted else network, model, folder)
        tokenizer = copy.deepcopy(model.tokenizer)
        if (pad := pad_for_scoring(tokenizer)) is not None:
            tokenizer.pad_token_id = pad
        tokenizer.save_pretrained(folder)
        (folder / INFO).write_text(json.dumps(asdict(info), indent=1) + "\n", encoding="utf-8")
    return path


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


def pad_for_scoring(tokenizer: Any) -> int | None:
    """A pad token that never ends a conversation.

    transformers reads a score at the last token that is not padding; where padding is the end-of-turn token
    itself, as many tokenizers have it, that is one token early. None: there is no other token to take.
    """
    ends = {tokenizer.eos_token_id}
    own = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids]
    return next((int(i) for i in own if i is not None and i not in ends), None)


# -- writing ----------------------------------------------------------------------------------------------


def _save_adapter(network: Any, head: ScalarHead, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(network.peft_config[network.active_adapter])
    config.task_type, config.modules_to_save, config.inference_mode = "SEQ_CLS", ["score"], True
    config.save_pretrained(folder)
    tensors = dict(get_peft_model_state_dict(network))
    save_tensors(folder / ADAPTER, {**tensors, f"base_model.model.{WEIGHT}": head.weight})


def _save_whole(lm: Any, model: ScoredModel, folder: Path) -> None:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    kind: Any = CLASSES.get(type(lm.config), None)
    prefix = lm.base_model_prefix
    if kind is None or kind.base_model_prefix != prefix:
        with no_progress_bars():
            lm.save_pretrained(folder)
        save_tensors(folder / HEAD, {WEIGHT: model.score.weight})
        return
    config = copy.deepcopy(lm.config)
    config.num_labels, config.pad_token_id = 1, pad_for_scoring(model.tokenizer)
    with torch.device("meta"):
        shell = kind(config)
    state = {k: t for k, t in lm.state_dict().items() if k.startswith(f"{prefix}.")}
    state[WEIGHT] = model.score.weight.detach()
    with no_progress_bars():
        shell.save_pretrained(folder, state_dict=state)


# -- reading ----------------------------------------------------------------------------------------------


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
