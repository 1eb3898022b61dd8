"""Rounding to half precision that keeps the mean of small changes."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

HIDDEN_BITS = {torch.bfloat16: 16, torch.float16: 13}  # the last bits of a float32, which rounding takes away
PIECE = 2**18  # moves that are drawn for a tensor; a larger one has them again and again


@torch.no_grad()
def spread(masters: Tensor, dtype: torch.dtype, name: str = "") -> Tensor:
    """Move float32 copies of `dtype` weights, in place, each to a place drawn from all that round to it.

    The weights stay what they were, to the bit. But copies start in the middle of what rounds to them, and
    all would have half a spacing to go before their weight moves: few in the first steps of 1e-5, then most
    at once. Spread out, a step of a tenth of the spacing moves a tenth of the weights, and their mean moves
    as in float32: dithering (Schuchman 1964, "Dither Signals and Their Effect on Quantization Noise"), done
    once. Zeros stay where they are. The draw follows from the name and the values: other layers draw other
    places, and so does the next optimiser of a policy that has moved.
    """
    hidden = HIDDEN_BITS.get(dtype)
    if hidden is None:
        return masters
    most = 2 ** (hidden - 1) - 1  # a half would be a tie, which may round to the neighbour
    flat = masters.view(-1)
    bits = flat.view(torch.int32)  # their integers count the float32 numbers from 0 on
    seed = zlib.crc32(name.encode()) + int(bits[:PIECE].sum(dtype=torch.int64))
    generator = torch.Generator(flat.device).manual_seed(seed % 2**63)
    count = min(PIECE, len(flat))
    moves = torch.randint(
        -most, most + 1, (count,), dtype=torch.int32, device=flat.device, generator=generator
    )
    usual = bool(flat.sum().isfinite()) and int(flat.count_nonzero()) == len(flat)
    for values, places in zip(torch.split(flat, PIECE), torch.split(bits, PIECE), strict=True):
        own = moves[: len(values)]
        places.add_(own if usual else own * ((values != 0) & values.isfinite()))
    return masters


@torch.no_grad()
def changed(weight: Tensor, change: Tensor, name: str = "") -> Tensor:
    """weight + change, out of place, in the dtype of `weight`: from a place spread over what rounds to it.

    A change of a hundredth of the spacing, such as an adapter's after a few steps, moves a hundredth of the
    weights; rounded from where a bf16 weight stands, the middle of its cell, it would move none. Without a
    change the weights stay, to the bit.
    """
    if weight.dtype not in HIDDEN_BITS:
        return weight.detach() + change.to(weight.dtype)
    wide = spread(weight.detach().to(torch.float32, copy=True), weight.dtype, name)
    return wide.add_(change.to(wide.dtype)).to(weight.dtype)
