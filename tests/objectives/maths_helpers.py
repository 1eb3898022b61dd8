"""Short constructors shared by the tests of the objectives, and the whole-step loss of a batch."""

import torch
from torch import Tensor

from stepladder.objectives.reduce import aggregate, step_denominators, trained_lengths


def f64(*values: object) -> Tensor:
    """A float64 tensor from numbers (one argument that is a list: that list)."""
    data = values[0] if len(values) == 1 and isinstance(values[0], list) else list(values)
    return torch.tensor(data, dtype=torch.float64)


def idx(*values: int) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long)


def flags(*values: int) -> Tensor:
    return torch.tensor(list(values), dtype=torch.bool)


def padded(rows: list[list[float]], fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """(values [B, T], mask [B, T]) from rows of different length, padded on the right."""
    width = max(map(len, rows))
    values = f64([row + [fill] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return values, mask


def step_loss(losses: Tensor, mask: Tensor, mode: str, **given: object) -> Tensor:
    """The loss of a step that is one batch."""
    return aggregate(losses, mask, step_denominators(trained_lengths(mask), mode=mode, **given))


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), of, retain_graph=True)[0]
