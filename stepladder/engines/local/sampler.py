"""Drawing tokens by a two-level inverse CDF: one pass over the vocabulary, log-probability included.

`torch.multinomial` over 64 × 49k weights takes 65 ms on two cores; this takes about 2 ms. The vocabulary
is cut into blocks; a uniform number first picks the block by the cumulated block masses, then the token
inside that one block. Several uniforms may draw from one row of logits (siblings that are still equal).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BLOCK = 256
ROWS = 8  # on a CPU so many rows at a time stay in the cache


def sample(
    logits: Tensor, rows: Sequence[int], temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token for each of m requests.

    Args:
        logits: [n, V], any float type; the maths is done in float32, cumulated sums in float64.
        rows: m row indices; request i draws from `logits[rows[i]]`.
        temperatures: m numbers ≥ 0. 0 takes the largest logit, its log-probability at temperature 1.
        uniforms: m numbers in [0, 1), float64.

    Returns:
        m token ids, and m log-probabilities: log_softmax(logits / temperature)[token] in nats.
        A token of probability 0 is never returned, whatever the uniform.

    Raises:
        FloatingPointError: a row of logits is not a distribution (NaN, +inf, or nothing finite).
    """
    if logits.device.type == "mps":  # float64 does not exist there
        logits = logits.cpu()
    device = logits.device
    lanes, lane_of, lane_temperatures = _lanes(rows, temperatures)
    scaled = _Scaled(_select(logits, lanes), lane_temperatures)
    top, peak, cdf = scaled.masses()
    total = cdf[:, -1]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError("the logits of a sequence hold NaN or infinity: the weights are broken")

    lane = torch.tensor(lane_of, device=device)
    if all(t == 0.0 for t in temperatures):
        token = _largest(scaled, peak[lane], lane)
    else:
        u = torch.tensor(uniforms, dtype=torch.float64, device=device)
        token = _invert(scaled, top, cdf, lane, u)
        if any(t == 0.0 for t in temperatures):
            greedy = torch.tensor([t == 0.0 for t in temperatures], device=device)
            token = torch.where(greedy, _largest(scaled, peak[lane], lane), token)
    logprob = scaled.at(lane[:, None], token[:, None])[:, 0] - top[lane] - total[lane].log()
    return token.tolist(), logprob.tolist()


class _Scaled:
    """Logits [n, V] over their temperatures (greedy: 1), in float32, made where they are needed: all of them
    at once would be a pass over memory for each operation."""

    def __init__(self, logits: Tensor, temperatures: Sequence[float]) -> None:
        self.logits = logits
        self.divisor: Tensor | None = None
        if any(t not in (0.0, 1.0) for t in temperatures):
            self.divisor = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)

    def at(self, lane: Tensor, token: Tensor) -> Tensor:
        """The values at `[lane, token]`, indices that broadcast."""
        values = self.logits[lane, token].float()
        return values if self.divisor is None else values / self.divisor[lane]

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        """(top [n], peak [n], cdf [n, blocks]): the largest value, the block that has it, and the cumulated
        sums of exp(value − top) by block in float64."""
        step = ROWS if self.logits.device.type == "cpu" else len(self.logits)
        parts = [self._masses(start, start + step) for start in range(0, len(self.logits), step)]
        top, peak, sums = (torch.cat(kind) if len(kind) > 1 else kind[0] for kind in zip(*parts, strict=True))
        return top, peak, sums.cumsum(-1)

    def _masses(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        values = self.logits[start:end].to(torch.float32, copy=True)
        if self.divisor is not None:
            values /= self.divisor[start:end, None]
        top, peak = _by_block(values, torch.amax).max(-1)
        return top, peak, _by_block(values.sub_(top[:, None]).exp_(), torch.sum).double()

    def block(self, lane: Tensor, block: Tensor) -> Tensor:
        """The values of a block of each lane [m, BLOCK], −inf beyond the vocabulary."""
        token = block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)
        size = self.logits.shape[1]
        values = self.at(lane[:, None], token.clamp(max=size - 1))
        return values.masked_fill_(token >= size, float("-inf"))


def _by_block(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[n, V] -> [n, ceil(V / BLOCK)]; the last block may be short."""
    whole = values.shape[1] // BLOCK * BLOCK
    parts = [reduce(values[:, :whole].view(len(values), -1, BLOCK), -1)] if whole else []
    if whole < values.shape[1]:
        parts.append(reduce(values[:, whole:], -1)[:, None])
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _lanes(rows: Sequence[int], temperatures: Sequence[float]) -> tuple[list[int], list[int], list[float]]:
    """The distinct (row, temperature) pairs, and which of them each request draws from."""
    index: dict[tuple[int, float], int] = {}
    lane_of = [index.setdefault(pair, len(index)) for pair in zip(rows, temperatures, strict=True)]
    return [row for row, _ in index], lane_of, [temperature for _, temperature in index]


def _select(logits: Tensor, lanes: list[int]) -> Tensor:
    if lanes == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(lanes, device=logits.device)]


def _largest(scaled: _Scaled, peak: Tensor, lane: Tensor) -> Tensor:
    """The first of the largest values of each lane. [m]"""
    return peak * BLOCK + scaled.block(lane, peak).argmax(-1)


def _invert(scaled: _Scaled, top: Tensor, cdf: Tensor, lane: Tensor, u: Tensor) -> Tensor:
    """The token of each request: the smallest k whose cumulated mass exceeds u × total. [m]"""
    target = u * cdf[lane, -1]
    outer = cdf[lane]
    block = _first_above(outer, target)
    before = outer.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0]
    rest = target - torch.where(block > 0, before, torch.zeros_like(before))
    mass = (scaled.block(lane, block) - top[lane, None]).exp_()
    return block * BLOCK + _first_above(mass.double().cumsum(-1), rest)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """First index with cdf > target, at most the last index that has mass of its own.

    Rounding can carry `target` up to the total; the bound keeps the answer on a token that has mass.
    """
    found = torch.searchsorted(cdf, target.clamp(min=0.0)[:, None], right=True)[:, 0]
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(found, last)
