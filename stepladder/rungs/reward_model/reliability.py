"""Does a model that says 80 % turn out right in 80 % of the cases?"""

from __future__ import annotations

from torch import Tensor

Reliability = tuple[tuple[float, float, int], ...]
"""(mean probability, share that was right, how many) of each bin that holds any, lowest first."""


def reliability(probabilities: Tensor, outcomes: Tensor, *, bins: int = 10) -> Reliability:
    """The table behind `objectives.reward_model.calibration_error`, over bins of equal width.

    >>> reliability(torch.tensor([0.62, 0.68, 0.91]), torch.tensor([True, False, True]))
    ((0.65, 0.5, 2), (0.91, 1.0, 1))
    """
    which = (probabilities.double() * bins).long().clamp(max=bins - 1)
    rows = []
    for b in sorted(set(which.tolist())):
        inside = which == b
        mean, share = probabilities[inside].double().mean(), outcomes[inside].double().mean()
        rows.append((round(float(mean), 6), round(float(share), 6), int(inside.sum())))
    return tuple(rows)
