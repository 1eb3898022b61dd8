"""The frozen policy that a rung began with: where a KL term or an implicit reward is measured from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from stepladder.errors import CheckpointError
from stepladder.policies.policy import Policy
from stepladder.policies.tensors import load_tensors, room_for, save_tensors


def frozen_reference(policy: Policy, path: Path, *, must_exist: bool) -> Policy:
    """A copy of `policy` without gradients, with the weights of `remembered`."""
    saved = remembered(policy, path, must_exist=must_exist)
    model = copy.deepcopy(policy.model)
    put_back(model, saved)
    model.requires_grad_(False)
    return Policy(model, policy.tokenizer, mode=policy.mode)


def remembered(policy: Policy, path: Path, *, must_exist: bool) -> dict[str, Tensor]:
    """The trained weights that `path` holds, by name.

    Where there is no such file it is written, from the present weights; with `must_exist` (the rung has
    already taken steps, so the present weights are not those it began with) CheckpointError is raised.
    """
    if not path.is_file():
        if must_exist:
            raise CheckpointError(
                f"{path} is gone: it holds the model that the rung began with; put it back, or start the run "
                "anew"
            )
        _write(policy, path)
    return load_tensors(path)


@torch.no_grad()
def put_back(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy weights into a model, by name."""
    names = dict(model.named_parameters())
    for name, tensor in saved.items():
        names[name].copy_(tensor)


@torch.no_grad()
def refresh_reference(reference: Policy, policy: Policy, path: Path) -> None:
    """The reference becomes what the policy is now; `path` then holds its weights."""
    _write(policy, path)
    frozen = dict(reference.model.named_parameters())
    for name, parameter in policy.trainable().items():
        frozen[name].copy_(parameter)


def _write(policy: Policy, path: Path) -> None:
    aside = path.with_name(f".{path.name}.new")
    with room_for("the model that the rung began with", path.parent):
        save_tensors(aside, {n: p.detach() for n, p in policy.trainable().items()})
    os.replace(aside, path)  # a kill while it is written leaves no half of it
