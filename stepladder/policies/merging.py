"""A model with its adapter merged into its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from stepladder.objectives.rounding import changed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def merge(model: Any) -> PreTrainedModel:
    """The plain model of a PEFT one, in place. peft adds an adapter to weights in their own precision, where
    a small one is lost in bf16; a LoRA layer's is therefore added first, spread (`changed`)."""
    for module in model.modules():
        if not _plain_lora(module):
            continue
        acting = [name for name in module.active_adapters if name in module.lora_A]
        if acting:
            weight = module.base_layer.weight
            weight.copy_(changed(weight, sum(module.get_delta_weight(name) for name in acting)))
        for name in acting:
            module.lora_B[name].weight.zero_()
    return cast("PreTrainedModel", model.merge_and_unload())


def _plain_lora(module: nn.Module) -> bool:
    return (
        hasattr(module, "lora_A")
        and type(module.base_layer) is nn.Linear
        and not module.merged
        and not module.disable_adapters
        and not any(getattr(module, "use_dora", {}).values())
    )
