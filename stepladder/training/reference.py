"""The frozen policy that a rung began with: where a KL term or an implicit reward is measured from."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch

from stepladder.errors import CheckpointError
from stepladder.policies.checkpoint import load_tensors, room_for, save_tensors
from stepladder.policies.policy import Policy


def frozen_reference(policy: Policy, path: Path, *, must_exist: bool) -> Policy:
    """A copy of `policy` without gradients, with the weights that `path` holds.

    Where there is no such file it is written, from the present weights; with `must_exist` (the rung has
    already taken steps, so the present weights are not those it began with) CheckpointError is raised.
    """
    model = copy.deepcopy(policy.model)
    names = dict(model.named_parameters())
    if path.is_file():
        saved = load_tensors(path)
        with torch.no_grad():
            for name, tensor in saved.items():
                names[name].copy_(tensor)
    elif must_exist:
        raise CheckpointError(
            f"{path} is gone: it holds the model that the rung began with, which the distance is measured "
            "from; put it back, or start the run anew"
        )
    else:
        _write(policy, path)
    model.requires_grad_(False)
    return Policy(model, policy.tokenizer, mode=policy.mode)


@torch.no_grad()
def refresh_reference(reference: Policy, policy: Policy, path: Path) -> None:
    """The reference becomes what the policy is now; `path` then holds its weights."""
    _write(policy, path)
    frozen = dict(reference.model.named_parameters())
    for name, parameter in policy.trainable().items():
        frozen[name].copy_(parameter)


def _write(policy: Policy, path: Path) -> None:
    aside = path.with_name(f".{path.name}.new")
    with room_for("the reference model", path.parent):
        save_tensors(aside, {n: p.detach() for n, p in policy.trainable().items()})
    os.replace(aside, path)  # a kill while it is written leaves no half of it
