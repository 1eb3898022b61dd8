"""Dropout off: behaviour and current log-probabilities must be of one function."""

from __future__ import annotations

from typing import Any

import torch


def zero_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of a model to 0, in its modules and in its config; the ratio-1 check needs it."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in list(vars(module).items()):  # such as `self.attention_dropout` of attention layers
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    config = getattr(model, "config", None)
    if config is not None:
        zero_config_dropout(config)


def zero_config_dropout(config: Any) -> None:
    from transformers import PretrainedConfig

    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            zero_config_dropout(value)
        elif isinstance(value, float) and ("dropout" in key or "pdrop" in key or "layerdrop" in key):
            setattr(config, key, 0.0)
