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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from stepladder.atomic import atomic_directory
from stepladder.errors import CheckpointError
from stepladder.policies.heads import ScalarHead, ScoredModel
from stepladder.policies.merging import merge
from stepladder.policies.quiet import no_progress_bars
from stepladder.policies.tensors import save_tensors

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
    `rungs.reward_model.reliability`).
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
