"""The table is pure data: it imports no torch, and every word in it names something that exists."""

import subprocess
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.objectives import advantages, kl, policy_gradient, reduce


def test_importing_the_table_loads_no_torch() -> None:
    code = "import sys, stepladder.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rows_that_are_promised_exist_under_their_own_name() -> None:
    promised = ["reinforce", "rloo", "reinforce++", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]
    assert set(promised) <= set(ALGORITHMS)
    assert all(name == row.name for name, row in ALGORITHMS.items())


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: row.name)
def test_every_word_of_a_row_is_one_of_its_choices(row: Algorithm) -> None:
    hints = get_type_hints(Algorithm)
    for field in fields(Algorithm):
        choices = get_args(hints[field.name])
        if choices and all(isinstance(choice, str) for choice in choices):
            assert getattr(row, field.name) in choices


def test_the_choices_are_those_of_the_objectives() -> None:
    hints = get_type_hints(Algorithm)
    assert get_args(hints["aggregation"]) == get_args(reduce.Aggregation)
    assert get_args(hints["ratio_level"]) == get_args(policy_gradient.RatioLevel)
    assert set(get_args(hints["baseline"])) == set(get_args(advantages.Baseline))
    assert set(get_args(hints["scale"])) == set(get_args(advantages.Scale))
    assert get_args(hints["kl_estimator"]) == get_args(kl.Estimator)
    assert set(get_args(hints["surrogate"])) == set(policy_gradient.SURROGATES)


def test_rows_differ_where_the_papers_differ() -> None:
    grpo, dr, dapo = ALGORITHMS["grpo"], ALGORITHMS["dr_grpo"], ALGORITHMS["dapo"]
    assert (grpo.scale, dr.scale) == ("group_std", "none")
    assert (grpo.aggregation, dr.aggregation, dapo.aggregation) == ("sequence_mean", "constant", "token_mean")
    assert (grpo.clip_high, dapo.clip_high) == (0.2, 0.28)
    assert (grpo.kl_in, grpo.kl_coefficient, dr.kl_in, dapo.kl_in) == ("loss", 0.04, "none", "none")
    gspo = ALGORITHMS["gspo"]
    assert (gspo.ratio_level, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    assert ALGORITHMS["ppo"].dual_clip is None
    assert ALGORITHMS["ppo"].needs_critic
    with pytest.raises(AttributeError):
        grpo.clip_low = 0.1  # type: ignore[misc]
