"""A trained model as a folder that any Hugging Face software opens."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepladder.atomic import atomic_directory
from stepladder.errors import CheckpointError
from stepladder.policies.merging import merge
from stepladder.policies.quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OWN_FILES = ("config.json", "adapter_config.json")
_HEAD = "model-head.safetensors"


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    merged: bool = False,
    untied: bool = False,
    stop_token_ids: Sequence[int] = (),
) -> Path:
    """Write model, tokenizer, chat template and generation config to `path`, whole or not at all.

    Weights are safetensors, tied ones stored once. A PEFT model is written as its adapter, or as a plain
    model with `merged=True`, and where its base was made from scratch: without a name of the base an
    adapter cannot be loaded. The merge works on a copy, so the weights in training do not change.
    `stop_token_ids` (default: the model's and the tokenizer's end tokens) become `eos_token_id`, so that
    other software stops where training did. An earlier export at `path` is replaced.

    Raises CheckpointError when `path` holds anything that is no export.
    """
    path = Path(path)
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not _is_export(path)):
        raise CheckpointError(f"{path} exists and holds no exported model; give a new folder.")
    from peft import PeftModel

    is_adapter = isinstance(model, PeftModel)
    if is_adapter and (merged or not _names_its_base(model)):
        # copy.deepcopy keeps every adapter type right (DoRA, saved modules) at the price of one more model.
        model = merge(copy.deepcopy(model))
    with atomic_directory(path) as folder:
        _save_network(model, folder)
        if untied and model.config.get_text_config().tie_word_embeddings:
            _untie(model, folder)
        tokenizer.save_pretrained(folder)
        _generation_config(model, tokenizer, stop_token_ids).save_pretrained(folder)
    return path


def _names_its_base(model: Any) -> bool:
    return all(config.base_model_name_or_path for config in model.peft_config.values())


def _save_network(model: Any, folder: Path) -> None:
    """`save_pretrained`, which knows tied weights; it also writes what we then overwrite."""
    with no_progress_bars():
        model.save_pretrained(folder)
    readme = folder / "README.md"  # peft writes a model card of empty headings
    readme.unlink(missing_ok=True)


def _untie(model: Any, folder: Path) -> None:
    """Add the output embeddings as a file of their own, and say so in the config."""
    from safetensors.torch import save_file

    head = model.get_output_embeddings()
    name = next(n for n, module in model.named_modules() if module is head) + ".weight"
    save_file({name: head.weight.detach().clone().contiguous()}, folder / _HEAD, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())
        listed["weight_map"][name] = _HEAD
        index.write_text(json.dumps(listed))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))


def _generation_config(model: Any, tokenizer: Any, stop_token_ids: Sequence[int]) -> Any:
    """End and pad ids only. Sampling defaults of the base model do not belong to the trained one."""
    from transformers import GenerationConfig

    stops: list[Any] = list(stop_token_ids)
    if not stops:
        own = getattr(model.generation_config, "eos_token_id", None)
        for found in (own, tokenizer.eos_token_id):
            stops += found if isinstance(found, list) else [found]
    stops = [token for token in dict.fromkeys(stops) if token is not None]
    eos = stops[0] if len(stops) == 1 else (stops or None)
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
    )


def _is_export(path: Path) -> bool:
    return any((path / name).is_file() for name in _OWN_FILES)
