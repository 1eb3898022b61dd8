"""Denominators of a step: what leaves the counts, what is joined, what other ranks add."""

import pytest
import torch
from maths_helpers import f64, flags, idx

from stepladder.objectives.reduce import aggregate, step_denominators, trained_lengths


def denominators(lengths: torch.Tensor, mode: str, **given: object) -> list[float]:
    return step_denominators(lengths, mode=mode, **given).tolist()


def test_each_mode_by_hand() -> None:
    lengths, group = idx(2, 4, 6), idx(0, 0, 1)
    assert denominators(lengths, "token_mean") == [12.0] * 3
    assert denominators(lengths, "sequence_mean") == [6.0, 12.0, 18.0]
    assert denominators(lengths, "constant", constant=10) == [30.0] * 3
    assert denominators(lengths, "sequence_sum") == [3.0] * 3
    assert denominators(lengths, "group_token_mean", group_index=group) == [12.0, 12.0, 12.0]


def test_rows_without_trained_tokens_leave_every_count() -> None:
    lengths, group = idx(2, 0, 6), idx(0, 1, 2)
    assert denominators(lengths, "sequence_sum") == [2.0] * 3
    assert denominators(lengths, "constant", constant=10) == [20.0] * 3
    assert denominators(lengths, "sequence_mean") == [4.0, 1.0, 12.0]
    assert denominators(lengths, "group_token_mean", group_index=group) == [4.0, 1.0, 12.0]


def test_a_split_trajectory_is_one_sequence_with_the_length_of_all_its_rows() -> None:
    lengths, trajectory = idx(2, 4, 6), idx(8, 8, 3)
    assert denominators(lengths, "sequence_mean", trajectory_index=trajectory) == [12.0, 12.0, 12.0]
    assert denominators(lengths, "sequence_sum", trajectory_index=trajectory) == [2.0] * 3


@pytest.mark.parametrize(
    "mode", ["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"]
)
def test_two_ranks_add_up_to_one(mode: str) -> None:
    losses, mask = (
        f64([[1.0, 2.0], [3.0, 9.0], [5.0, 6.0]]),
        torch.stack([flags(1, 1), flags(1, 0), flags(1, 1)]),
    )
    lengths, group = trained_lengths(mask), idx(0, 0, 1)
    whole = aggregate(losses, mask, step_denominators(lengths, mode=mode, group_index=group, constant=4))
    parts = []
    for rows in (slice(0, 2), slice(2, 3)):
        d = step_denominators(
            lengths[rows],
            mode=mode,
            group_index=group[rows],
            constant=4,
            tokens=5.0,
            sequences=3.0,
            groups=2.0,
        )
        parts.append(aggregate(losses[rows], mask[rows], d))
    assert sum(parts).item() == pytest.approx(whole.item())


def test_the_loss_is_a_scalar_in_the_working_dtype() -> None:
    d = step_denominators(idx(1), mode="token_mean")
    assert d.dtype == torch.float64
    loss = aggregate(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), d)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
