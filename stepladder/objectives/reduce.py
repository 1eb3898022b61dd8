"""From token losses to one number: five aggregations, each with the denominator of the whole optimiser step.

Every aggregation is a sum of token losses over a denominator that belongs to the row:

    L = Σ_i Σ_t m_it·ℓ_it / D_i

    token_mean        D_i = N                  N trained tokens of the step
    sequence_mean     D_i = S·len(i)           S trajectories of the step, len(i) trained tokens of i's
    constant          D_i = S·L                L a fixed length, the generation limit
    sequence_sum      D_i = S
    group_token_mean  D_i = Q·tokens(q(i))     Q groups of the step, tokens(q) trained tokens of group q

So `step_denominators` is called once on the rows of the whole step, its result is cut like any other
column, and the losses of the micro-batches are *added*. The gradient then does not depend on how the step
was cut."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._checks import require_bool, require_choice, require_same_shape, working, zero_where_masked

Aggregation = Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"]


def trained_lengths(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B"]:
    """Trained tokens of each row: len_i = Σ_t m_it. Tool output and padding do not count (mask False)."""
    require_bool(mask)
    return mask.sum(dim=-1)


def sum_by_index(values: Tensor, index: Int[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    """Sums of `values` [n] over equal indices, as (for each row the sum of its class, for each class the
    sum)."""
    require_same_shape(values=values, index=index)
    _, inverse = torch.unique(index, return_inverse=True)
    classes = int(inverse.max()) + 1 if inverse.numel() else 0
    sums = torch.zeros(classes, dtype=values.dtype, device=values.device).index_add(0, inverse, values)
    return sums[inverse], sums


def step_denominators(
    lengths: Int[Tensor, "n"],
    *,
    mode: Aggregation,
    trajectory_index: Int[Tensor, "n"] | None = None,
    group_index: Int[Tensor, "n"] | None = None,
    constant: float | None = None,
    tokens: float | None = None,
    sequences: float | None = None,
    groups: float | None = None,
) -> Float[Tensor, "n"]:
    """The denominator D_i of every row of one optimiser step, in float64.

    `lengths` are the trained tokens of all rows of the step (`trained_lengths` of the whole mask, before it
    is cut). Rows of one trajectory share a `trajectory_index`: a trajectory that was split into several
    samples counts once and its length is that of all its rows. `group_index` is needed by
    `group_token_mean`, `constant` (tokens, > 0) by `constant`. Rows, trajectories and groups without
    trained tokens leave the counts (sources: DESIGN "the gradient does not depend on how a batch is cut";
    verl and TRL count them in some modes).

    Over several ranks, reduce the counts first and pass them as `tokens`, `sequences`, `groups`; the
    trajectories and groups themselves must lie whole on one rank. Raises when a count is below that of the
    rows given."""
    require_choice("mode", mode, get_args(Aggregation))
    own_trajectory = torch.arange(len(lengths), device=lengths.device)
    trajectory = own_trajectory if trajectory_index is None else trajectory_index
    require_same_shape(lengths=lengths, trajectory_index=trajectory)
    trained = lengths.double()
    row_trajectory_tokens, trajectory_tokens = sum_by_index(trained, trajectory)
    row_group_tokens, group_count = torch.ones_like(trained), 1.0
    if mode == "group_token_mean":
        row_group_tokens, group_count = _group_counts(trained, group_index)
    counts = {
        "tokens": _of_step("tokens", tokens, float(trained.sum())),
        "sequences": _of_step("sequences", sequences, float((trajectory_tokens > 0).sum())),
        "groups": _of_step("groups", groups, group_count),
    }
    # D_i = what the step counts × what the row counts
    per_row = {
        "token_mean": counts["tokens"] * torch.ones_like(trained),
        "sequence_mean": counts["sequences"] * row_trajectory_tokens,
        "constant": counts["sequences"] * torch.full_like(trained, _fixed_length(mode, constant)),
        "sequence_sum": counts["sequences"] * torch.ones_like(trained),
        "group_token_mean": counts["groups"] * row_group_tokens,
    }[mode]
    # A row without trained tokens has nothing to divide; 1 keeps its zero a zero.
    return torch.where(per_row > 0, per_row, torch.ones_like(per_row))


def _of_step(name: str, given: float | None, of_rows: float) -> float:
    """The count of the whole step, which cannot be below that of the rows at hand."""
    if given is None:
        return of_rows
    if not of_rows <= given < float("inf"):
        raise ValueError(
            f"{name} is {given}, but the rows given hold {of_rows:g} alone; pass the sum over all ranks"
        )
    return given


def _fixed_length(mode: str, constant: float | None) -> float:
    if mode != "constant":
        return 1.0
    if constant is None or not 0 < constant < float("inf"):
        raise ValueError(
            "mode 'constant' needs a positive constant (the generation limit, in tokens), "
            f"got {constant}; for example constant=3000"
        )
    return constant


def _group_counts(trained: Tensor, group_index: Tensor | None) -> tuple[Tensor, float]:
    if group_index is None:
        raise ValueError("mode 'group_token_mean' needs group_index; pass the prompt group of each row")
    require_same_shape(lengths=trained, group_index=group_index)
    per_row, per_group = sum_by_index(trained, group_index)
    return per_row, float((per_group > 0).sum())


def aggregate(
    token_losses: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], denominators: Float[Tensor, "B"]
) -> Float[Tensor, ""]:
    """L = Σ_i Σ_t m_it·ℓ_it / D_i, a scalar in at least float32.

    `denominators` are the rows' entries of `step_denominators`. Adding the results of all micro-batches
    gives the loss of the step; an all-masked batch gives a 0 that is connected to the graph, with zero
    gradients. Under a back end that averages gradients over ranks, multiply by the world size."""
    require_same_shape(token_losses=token_losses, mask=mask)
    require_bool(mask)
    if denominators.shape != token_losses.shape[:1]:
        raise ValueError(
            f"denominators has shape {tuple(denominators.shape)}; "
            f"pass one per row, {tuple(token_losses.shape[:1])}"
        )
    rows = working(zero_where_masked(mask, token_losses)).sum(dim=-1)
    return (rows / denominators.to(rows.dtype)).sum()


def merge_metrics(parts: list[dict[str, Tensor]], *, count: str = "tokens") -> dict[str, Tensor]:
    """Metrics of a step from those of its micro-batches: means weighted by their `count`, `_max` as maximum.

    `perplexity`, `ppl_ratio` and `ess` are no means; they are computed again from the merged means.
    `explained_variance` and `score_std` stay means of the micro-batches' own values.

    Summing or averaging the parts is the known fault (accuracies above 1 under accumulation); every metrics
    dictionary of this layer therefore carries the number of what it averaged over, `tokens` or `pairs`.
    """
    if not parts:
        return {}
    weights = torch.stack([part[count] for part in parts])
    merged = {count: weights.sum()}
    for name in parts[0]:
        values = torch.stack([part[name] for part in parts])
        if name.endswith("_max"):
            merged[name] = values.max()
        elif name != count:
            merged[name] = (values * weights).sum() / weights.sum().clamp(min=1)
    for name in merged.keys() & _FROM_MEANS.keys():
        sources, formula = _FROM_MEANS[name]
        if merged.keys() >= set(sources):
            merged[name] = formula(*(merged[source] for source in sources))
    return merged


# (Σw)²/(n·Σw²) = mean(w)²/mean(w²), with mean(w) = k3 + 1 − k1 and mean(w²) = χ² + 1
_FROM_MEANS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "perplexity": (("nll",), torch.exp),
    "ppl_ratio": (("mismatch_k1",), torch.exp),
    "ess": (
        ("mismatch_k1", "mismatch_k3", "chi2"),
        lambda k1, k3, chi2: (k3 + 1 - k1) ** 2 / (chi2 + 1).clamp(min=1e-30),
    ),
}
