"""Exact match and F1 of question answering: golden numbers, table F row 15, what normalisation hides."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.rewards.qa import exact_match, normalised, token_f1

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden.json").read_text(encoding="utf-8"))


def test_the_golden_normalisations():
    assert {text: normalised(text) for text in GOLDEN["qa.norm"]["value"]} == GOLDEN["qa.norm"]["value"]


def test_the_golden_f1():
    # (the | cat sat on mat) against (a | cat on the mat): 3 shared of 4 and of 3 -> 2*.75*1/1.75
    assert token_f1("the cat sat on mat", "a cat on the mat") == pytest.approx(GOLDEN["qa.f1"]["value"]["a"])
    # (1982) against (in 1982): precision 1, recall 1/2
    assert token_f1("1982", "in 1982") == pytest.approx(GOLDEN["qa.f1"]["value"]["b"])


def test_row_15_the_search_agent_of_the_documents_is_right():
    """The documents' trajectory answers "1982" and the gold is "1982": reward 1, else 0."""
    assert exact_match("1982", "1982") == 1.0
    assert exact_match("1983", "1982") == 0.0
    assert exact_match(" 19-82. ", "1982") == 1.0


def test_any_alias_counts_and_none_is_refused():
    assert exact_match("The U.S.A.", ["United States", "USA"]) == 1.0
    assert token_f1("states", ["usa", "united states"]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="at least one gold answer"):
        exact_match("x", [])


def test_empty_after_normalisation():
    assert token_f1("the", "a") == 1.0
    assert token_f1("the", "x") == 0.0


@given(st.text(), st.text())
def test_f1_is_symmetric_bounded_and_one_where_exact_match_is(a, b):
    score = token_f1(a, b)
    assert score == pytest.approx(token_f1(b, a))
    assert 0.0 <= score <= 1.0
    if exact_match(a, b):
        assert score == 1.0
