"""Splits by content: nothing on both sides, whatever the order and the rest of the file. Faults 81, 118."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.files.records import Demonstration, Preference, Ranking, Record, Steps, Text, Unpaired
from stepladder.data.files.split import content_key, dedupe, fingerprint_of, split_by_content, split_key
from stepladder.errors import ConfigError, DataError
from stepladder.types import Message, Tool


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


WORDS = st.text("ab ", min_size=1, max_size=3)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(lambda p, a: Demonstration((*user(p), *said(a))), WORDS, WORDS),
    st.builds(lambda p, a: Demonstration((*user(p), *said(a)), answers_from=1), WORDS, WORDS),
    st.builds(Text, WORDS),
    st.builds(lambda p, a, b: Preference(user(p), said(a), said(b)), WORDS, WORDS, WORDS),
    st.builds(lambda p, a, x: Unpaired(user(p), said(a), x), WORDS, WORDS, st.booleans()),
    st.builds(lambda p, a, b: Ranking(user(p), (said(a), said(b))), WORDS, WORDS, WORDS),
    st.builds(lambda p, a: Steps(user(p), (a,)), WORDS, WORDS),
)
FILES = st.lists(RECORDS, min_size=1, max_size=40)
HELD = st.integers(0, 20) | st.floats(0, 0.9)


def sides(
    rows: list[Record], held_out: int | float, seed: int = 0
) -> tuple[list[Record], list[Record]] | None:
    try:
        return split_by_content(rows, held_out, seed)
    except DataError:
        return None


@settings(deadline=None)
@given(FILES, HELD, st.integers(0, 3))
def test_fault_81_the_sides_have_no_conversation_and_no_prompt_in_common(
    rows: list[Record], held_out: int | float, seed: int
) -> None:
    found = sides(rows, held_out, seed)
    if found is None:
        return
    train, held = found
    assert not {split_key(r) for r in train} & {split_key(r) for r in held}
    kept = sorted(map(content_key, [*train, *held]))
    assert kept == sorted({content_key(r) for r in rows})  # nothing is lost but repetitions
    assert not isinstance(held_out, int) or len(held) <= held_out


@settings(deadline=None)
@given(FILES, FILES, st.floats(0, 0.9))
def test_fault_81_the_side_of_a_row_does_not_depend_on_the_other_rows(
    rows: list[Record], more: list[Record], share: float
) -> None:
    small, large = sides(rows, share), sides([*more, *rows], share)
    if small is not None and large is not None:
        for few, many in zip(small, large, strict=True):
            assert {content_key(r) for r in few} <= {content_key(r) for r in many}


@settings(deadline=None)
@given(FILES, HELD, st.randoms())
def test_the_order_of_the_file_decides_no_side(
    rows: list[Record], held_out: int | float, rng: object
) -> None:
    mixed = list(rows)
    rng.shuffle(mixed)
    before, after = sides(rows, held_out), sides(mixed, held_out)
    if before is None or after is None:
        assert before is after is None
        return
    for a, b in zip(before, after, strict=True):
        assert sorted(map(content_key, a)) == sorted(map(content_key, b))
    if all(x != y for x, y in pairwise(rows)):  # each side keeps the order of the file
        places = [min(i for i, r in enumerate(rows) if r == kept) for kept in before[0]]
        assert places == sorted(places)


def test_a_number_is_met_exactly_and_a_share_nearly() -> None:
    rows = [Text(str(i)) for i in range(1000)]
    for n in (0, 1, 16, 999):
        train, held = split_by_content(rows, n, 0)
        assert (len(train), len(held)) == (1000 - n, n)
    # a fair coin of .1 a thousand times: 100 held, standard deviation 9.5
    assert 60 < len(split_by_content(rows, 0.1, 0)[1]) < 140
    first, second = (split_by_content(rows, 100, seed)[1] for seed in (0, 1))
    assert first != second


def test_answers_to_one_prompt_go_together() -> None:
    pairs = [Preference(user(f"p{i // 4}"), said(f"a{i}"), said("b")) for i in range(40)]
    train, held = split_by_content(pairs, 10, 0)
    assert len(held) == 8  # two prompts of four; a third would pass ten
    assert len(train) == 32
    with pytest.raises(DataError, match=r"1 of 4 different rows .* cannot be held out: they all belong"):
        split_by_content(pairs[:4], 1, 0)
    spaced = Preference(user("p0 "), said("z"), said("b"))  # white space makes no other prompt
    assert split_key(spaced) == split_key(pairs[0])
    assert content_key(spaced) != content_key(pairs[0])


@pytest.mark.parametrize("held_out", [-1, 1.0, -0.1, True])
def test_a_share_or_number_that_makes_no_sense_is_refused(held_out: float) -> None:
    with pytest.raises(ConfigError, match=r"neither a share below 1 nor a number of rows; try 0.05 or 16"):
        split_by_content([Text("a")], held_out, 0)


def test_everything_held_out_is_refused() -> None:
    with pytest.raises(DataError, match="nothing would be left to train on; hold out 0 or give more rows"):
        split_by_content([Text("a"), Text("a")], 1, 0)


def test_fault_118_every_process_splits_alike() -> None:
    """Python's own hashes differ from process to process (PYTHONHASHSEED); these do not."""
    rows = [Text(str(i)) for i in range(30)]
    here = [r.text for r in split_by_content(rows, 7, 3)[1]]
    code = (
        "import json; from stepladder.data.files.records import Text; "
        "from stepladder.data.files.split import split_by_content as s; "
        "print(json.dumps([r.text for r in s([Text(str(i)) for i in range(30)], 7, 3)[1]]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert json.loads(done.stdout) == here, done.stderr


def test_the_fingerprint_changes_with_anything_a_trainer_sees() -> None:
    base = Preference(user("p"), said("a"), said("b"))
    others = [
        Preference(user("p"), said("b"), said("a")),
        Preference(user("p"), said("a"), said("b"), margin=1.0),
        Preference(user("p"), said("a"), said("b"), (Tool("add", "", {}),)),
        Unpaired(user("p"), said("a"), True),
        Unpaired(user("p"), said("a"), False),
    ]
    prints = [fingerprint_of([r]) for r in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint_of([base, others[0]]) != fingerprint_of([others[0], base])
    tool = Tool("add", "", {}, function=lambda: None)
    with_function = Preference(user("p"), said("a"), said("b"), (tool,))
    assert fingerprint_of([with_function]) == prints[3]  # where the function lies in memory is no content
    assert dedupe([base, others[0], base]) == [base, others[0]]
