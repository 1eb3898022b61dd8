"""Signals of collapse, by hand and at their limits."""

import math

import pytest
import torch

from stepladder.diagnostics.signals import template_collapse, variance_top_p


def test_perfectly_informative_reasoning_reaches_the_bound() -> None:
    cross = torch.tensor([[-1.0, -900.0, -900.0], [-900.0, -2.0, -900.0], [-900.0, -900.0, -3.0]])
    signal = template_collapse(cross, torch.tensor([0, 1, 2]))
    assert signal.mutual_information.item() == pytest.approx(math.log(3))
    assert signal.bound.item() == pytest.approx(math.log(3))
    assert signal.conditional_entropy.item() == pytest.approx(2.0)
    assert signal.retrieval_accuracy.item() == 1.0


def test_input_agnostic_reasoning_has_none_whatever_its_entropy() -> None:
    cross = torch.tensor([[-50.0, -50.0], [-1.0, -1.0]])
    assert template_collapse(cross, torch.tensor([1, 0])).mutual_information.item() == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("cross", "index", "words"),
    [
        (torch.zeros(2, 2), torch.tensor([0]), "one prompt index per row"),
        (torch.zeros(2, 2), torch.tensor([0, 2]), r"\[0, 2\)"),
        (torch.full((2, 2), float("nan")), torch.tensor([0, 1]), "NaN or infinity"),
    ],
)
def test_bad_matrices_are_refused(cross: torch.Tensor, index: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        template_collapse(cross, index)


def test_variance_filter_keeps_the_largest_and_never_a_flat_group() -> None:
    kept = variance_top_p(torch.tensor([0.0, 0.1, 0.25, 0.1875, 0.0, 0.1875]), share=0.9)
    assert kept.tolist() == [False, True, True, True, False, True]
    halves = torch.tensor([0.5, 0.375, 0.125])  # exact in binary: .5 is not below .5·1
    assert variance_top_p(halves, share=0.5, slack=0.0).tolist() == [True, False, False]
    assert variance_top_p(torch.zeros(3)).tolist() == [False] * 3
    assert variance_top_p(torch.tensor([0.2, 0.1]), share=1.0, slack=0.0).tolist() == [True, True]
    with pytest.raises(ValueError, match="share"):
        variance_top_p(torch.ones(2), share=0.0)
    with pytest.raises(ValueError, match="not negative"):
        variance_top_p(torch.tensor([-1.0]))
