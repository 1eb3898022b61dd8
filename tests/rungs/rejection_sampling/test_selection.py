"""Which episodes rejection sampling keeps: by hand, and the reasons add up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.data.files.datasets import read_dataset
from stepladder.errors import ConfigError
from stepladder.recipe.config import load_recipe
from stepladder.recipe.rejection_sampling import Selection
from stepladder.run.records import encode_line
from stepladder.run.training_files import accepted_row, pair_row
from stepladder.rungs.rejection_sampling.acceptance import count, shares, told
from stepladder.rungs.rejection_sampling.selection import (
    REASONS,
    Reason,
    Seen,
    accepted,
    best_and_worst,
    select,
    statistical,
)
from stepladder.types import Failure, Group, Message, Sampling, Score, Task, Tool, ToolCall, Trajectory, Turn

TASK = Task("train/7", "train", "sums", (Message("user", "2 + 3?"),))
ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})


def played(
    answer: str,
    score: float | None,
    *,
    tokens: int = 1,
    stop: Any = "terminated",
    failure: Failure | None = None,
    calls: tuple[ToolCall, ...] = (),
    task: Task = TASK,
) -> Trajectory:
    ids = tuple(range(tokens))
    turn = Turn((1,), ids, (0.0,) * tokens, Sampling(), ((0, tokens),), "stop")
    return Trajectory(
        id=answer,
        group_id="g",
        task=task,
        turns=(turn,),
        messages=(*task.messages, Message("assistant", answer, tool_calls=calls, raw=answer)),
        rewards=(score,),
        score=Score(score),
        stop_reason=stop,
        failure=failure,
        tools=(ADD,),
    )


def group(*trajectories: Trajectory, task: Task = TASK) -> Group:
    return Group("g", task, trajectories)


def selected(g: Group, **settings: Any) -> list[Reason]:
    return select(g, Selection(**settings), Seen(), seed=0)


SEVEN = group(
    played("five", 1.0, tokens=3),
    played("5", 1.0, tokens=1),
    played("five", 1.0, tokens=4),  # said before
    played("6", 0.0),
    played("5 and", 1.0, stop="length"),
    played("?", None),
    played("", None, stop="failed", failure=Failure("tool", "ToolError", "gone")),
    played("It is 5", 1.0, tokens=2),
)


def test_every_reason_by_hand() -> None:
    """Solved, unique, in order; two of a task: the third unique one is over the cap."""
    assert selected(SEVEN, cap=2) == [
        "accepted", "accepted", "duplicate", "unsolved", "cut", "unsolved", "failed", "over_cap",
    ]  # fmt: skip


def test_the_shortest_and_the_best_come_first() -> None:
    assert [i for i, r in enumerate(selected(SEVEN, keep="shortest", cap=1)) if r == "accepted"] == [1]
    scored = group(played("a", 0.2), played("b", 0.9), played("c", None), played("d", 0.9))
    reasons = selected(scored, keep="best", require="scored", cap=1)
    assert reasons == ["over_cap", "accepted", "unscored", "over_cap"]  # of equals the one sampled first


def test_what_was_accepted_in_an_earlier_batch_counts() -> None:
    """A round remembers contents and the tasks' counts, whatever the batch."""
    seen = Seen()
    settings = Selection(cap=2)
    assert select(group(played("5", 1.0)), settings, seen, seed=0) == ["accepted"]
    again = select(group(played("5", 1.0), played("five", 1.0), played("V", 1.0)), settings, seen, seed=1)
    assert again == ["duplicate", "accepted", "over_cap"]
    other = Task("train/8", "train", "sums", (Message("user", "1 + 4?"),))
    assert select(group(played("5", 1.0, task=other), task=other), settings, seen, seed=0) == ["accepted"]


def test_statistical_acceptance_is_exp_of_the_gap_over_beta() -> None:
    """r 2, 1.5, 1 at beta .5: exp(0), exp(-1), exp(-2) = 1, .367879, .135335 (arXiv:2309.06657).

    20,000 draws: the standard error of a share p is sqrt(p(1-p)/20000) <= .0035; four of them are allowed.
    """
    n, taken = 20_000, [0, 0, 0]
    for seed in range(n):
        for i, yes in enumerate(statistical([2.0, 1.5, 1.0], 0.5, seed=seed)):
            taken[i] += yes
    for share, wanted in zip((t / n for t in taken), (1.0, math.exp(-1), math.exp(-2)), strict=True):
        assert share == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / n) + 1e-12)


def test_statistical_selection_draws_the_tilted_policy() -> None:
    """Two answers with policy 1/2 each and scores 0 and ln 3 at beta 1: accepted 1 : 3."""
    kept = {"a": 0, "b": 0}
    for seed in range(4000):
        pair = group(played("a", 0.0), played("b", math.log(3.0)))
        for trajectory, reason in zip(
            pair.trajectories,
            select(pair, Selection(keep="statistical", beta=1.0), Seen(), seed=seed),
            strict=True,
        ):
            assert reason in ("accepted", "not_drawn")
            kept[trajectory.id] += reason == "accepted"
    assert kept["b"] == 4000
    assert kept["a"] == pytest.approx(4000 / 3, abs=4 * math.sqrt(4000 * 2 / 9))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0, None])), max_size=12), st.data())
def test_every_episode_has_one_reason_and_no_rule_is_broken(
    rows: list[tuple[str, float | None]], data: st.DataObject
) -> None:
    settings = Selection(
        keep=data.draw(st.sampled_from(["all", "best", "shortest", "statistical"])),
        cap=data.draw(st.integers(1, 3)),
        require=data.draw(st.sampled_from(["auto", "solved", "scored"])),
    )
    g = group(*(played(answer, score) for answer, score in rows))
    reasons = select(g, settings, Seen(), seed=0)
    tally: dict[str, int] = {}
    count(tally, [g], [reasons], pairs=0)
    assert sum(tally.get(reason, 0) for reason in (*REASONS, "accepted")) == len(rows) == tally["sampled"]
    kept = accepted([g], [reasons])
    said = [t.messages[-1].text for t in kept]
    assert len(said) == len(set(said)) <= settings.cap
    if settings.required == "solved":
        assert all(t.score.value == 1.0 for t in kept)
        assert bool(kept) == any(score == 1.0 for _, score in rows) or settings.keep == "statistical"


def test_the_tally_says_what_was_thrown_away() -> None:
    tally: dict[str, int] = {}
    count(tally, [SEVEN], [selected(SEVEN, cap=2)], pairs=1)
    count(tally, [group(played("7", 0.0))], [["unsolved"]], pairs=0)
    metrics = shares(tally)
    assert metrics["acceptance"] == 2 / 9
    assert metrics["pass_at_n"] == 1 / 2
    assert told(tally, 8) == (
        "2 of 9 episodes accepted (22%), pass@8 50%, 1 pairs; thrown away: 1 failed, 1 cut off, 3 unsolved, "
        "1 said before, 1 over the cap"
    )


def test_pairs_are_the_best_against_the_worst_that_ended_by_themselves() -> None:
    pair = best_and_worst(SEVEN, Selection())
    assert pair is not None
    assert [t.id for t in pair] == ["five", "6"]
    assert best_and_worst(group(played("a", 1.0), played("b", 1.0)), Selection()) is None
    assert best_and_worst(group(played("a", 0.4), played("b", 0.1)), Selection()) is None  # neither solved
    some = best_and_worst(group(played("a", 0.4), played("b", 0.1)), Selection(require="scored"))
    assert some is not None
    row = pair_row(*some)
    assert row["prompt"] == [{"role": "user", "content": "2 + 3?"}]
    assert row["chosen"] == [{"role": "assistant", "content": "a"}]
    assert row["rejected"] == [{"role": "assistant", "content": "b"}]
    assert (row["score_chosen"], row["score_rejected"]) == (0.4, 0.1)


def test_a_row_is_what_our_own_reader_reads(tmp_path: Path) -> None:
    good = played("", 1.0, calls=(ToolCall("add", {"a": 1}, id="c0"),))
    (tmp_path / "a.jsonl").write_bytes(encode_line(accepted_row(good)))
    (tmp_path / "p.jsonl").write_bytes(encode_line(pair_row(good, played("no", 0.0))))
    (read,) = read_dataset(tmp_path / "a.jsonl", "demonstration").records
    (pair,) = read_dataset(tmp_path / "p.jsonl", "preference").records
    assert pair.prompt == TASK.messages
    assert (pair.chosen, pair.tools) == (read.messages[1:], read.tools)
    assert pair.rejected == (Message("assistant", "no"),)
    assert read.tools == (ADD,)
    assert read.messages[-1].tool_calls == good.messages[-1].tool_calls


def test_a_call_that_could_not_be_read_stays_text() -> None:
    broken = played("<tool>{", 1.0, calls=(ToolCall("", error="no JSON", raw="<tool>{"),))
    assert accepted_row(broken)["messages"][-1] == {"role": "assistant", "content": "<tool>{"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rejection_sampling.beta=0.1", 'set keep = "statistical"'),
        ("rejection_sampling.restart=true", "set rounds = 2"),
        ("rejection_sampling.kepe=best", "Did you mean 'keep'"),
        ("environment=null", r"\[rejection_sampling\] plays episodes"),
    ],
)
def test_contradictory_settings_are_refused(override: str, message: str) -> None:
    data = {"environment": {"name": "calculator"}, "rejection_sampling": {}}
    with pytest.raises(ConfigError, match=message):
        load_recipe(data, [override])
