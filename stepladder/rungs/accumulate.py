"""One optimiser step in two halves: gradients summed over micro-batches, then the step itself.

This is the only place in which a rung calls `backward`. The denominators of a loss belong to the whole step,
so how a batch is cut does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from stepladder.objectives.reduce import merge_metrics
from stepladder.policies.optimizer import MasterOptimizer

Metrics = dict[str, float]
PartLoss = Callable[[list[int]], tuple[Tensor, dict[str, Tensor], int]]
"""The rows of a micro-batch to (their share of the step's loss, their metrics, tokens computed)."""


def accumulate(
    batches: Iterable[list[int]], loss: PartLoss, *, weight: float = 1.0, count: str = "tokens"
) -> Metrics:
    """Add the gradients of `weight` times the loss of each micro-batch; return the metrics of them all.

    `loss` comes back without the weight, `tokens_computed` as a sum, and the other metrics as means weighted
    by the metric `count` (see `merge_metrics`).
    """
    parts: list[dict[str, Tensor]] = []
    total, computed = 0.0, 0
    for rows in batches:
        part, metrics, tokens = loss(rows)
        (weight * part).backward()  # type: ignore[no-untyped-call]
        total += float(part.detach())
        computed += tokens
        if metrics:
            parts.append(metrics)
    merged = floats(merge_metrics(parts, count=count))
    return {**merged, "loss": total, "tokens_computed": float(computed)}


def take_step(
    optimizer: MasterOptimizer, learning_rate: float, check: Callable[[], None] | None = None
) -> float:
    """Step the optimiser and return the gradient's norm.

    `check` is called while the weights are still those that were measured. Whatever it raises leaves them
    untouched and drops the gradients.
    """
    if check is not None:
        try:
            check()
        except BaseException:
            optimizer.clear()
            raise
    return optimizer.step(learning_rate)


def floats(metrics: dict[str, Tensor]) -> Metrics:
    """Return the metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}
