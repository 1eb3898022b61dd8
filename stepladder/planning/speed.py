"""Seconds of an update and of playing, from operations, bytes and two measured rates. Imports no torch.

Each kernel takes as long as its arithmetic at the rate of a large matrix product, or its traffic at the rate
of a copy: a bound from below that real kernels miss by a third or so, which `SLACK` adds.
"""

from __future__ import annotations

from stepladder.planning.machine import Machine
from stepladder.planning.memory import FLOAT
from stepladder.planning.shape import Shape, forward_flops, saved_bytes

SLACK = 1.3
TRAFFIC = 4  # times that what a layer keeps is written or read: forward, backward, and its gradients


def update_seconds(
    shape: Shape, width: int, machine: Machine, *, tokens: float, context: float, trainable: int, head: bool
) -> float:
    """One optimiser step on `tokens` (each seeing `context` others), `head`: with log-probabilities.

    Backward is twice forward where all weights are trained and once where few are (LoRA). The logits are
    made again in the backward pass of a trained head.
    """
    most = trainable > shape.parameters / 2
    flops = forward_flops(shape, context, head=False) * (3 if most else 2)
    if head:
        flops += 2 * shape.vocabulary * shape.hidden * (4 if trainable > shape.matrices * 1.05 else 2)
    traffic = TRAFFIC * saved_bytes(shape, width) * shape.layers * tokens
    optimiser = 7 * FLOAT * trainable  # reads weight, gradient and moments; writes weight and moments
    return SLACK * (tokens * flops / machine.flops + (traffic + optimiser) / machine.bandwidth)


def forward_seconds(shape: Shape, machine: Machine, *, tokens: float, context: float) -> float:
    """A pass without gradients, with log-probabilities (a reference, a teacher)."""
    return SLACK * tokens * forward_flops(shape, context) / machine.flops


def play_seconds(
    shape: Shape,
    width: int,
    machine: Machine,
    *,
    episodes: int,
    rows: int,
    sampled: int,
    prompts: int,
    context: int,
) -> float:
    """Episodes of `sampled` tokens each, `rows` at a time, and `prompts` tokens of prompts, once a group.

    A step of decoding reads all weights and the caches once, and multiplies a row for each episode. Tools
    take no time here.
    """
    at_once = min(episodes, rows)
    read = width * (shape.active_matrices + shape.vocabulary * shape.hidden)
    read += width * shape.kv_values * at_once * context // 2
    work = at_once * forward_flops(shape, context / 2)
    decode = -(-episodes // rows) * sampled * max(read / machine.bandwidth, work / machine.flops)
    prefill = prompts * forward_flops(shape, context / 2, head=False) / machine.flops
    return SLACK * (decode + prefill)
