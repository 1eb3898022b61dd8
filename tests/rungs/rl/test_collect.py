"""Dynamic sampling: what is dropped, what is played instead, and that it always ends."""

from __future__ import annotations

from told_episodes import episode, group

from stepladder.rungs.rl.collect import Draw, collect, nothing_to_learn, spread
from stepladder.types import Group, Task

LIVE, SOLVED, FAILED = (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)


class Source:
    """Hands out groups with these scores, and counts what was asked of it."""

    def __init__(self, *scores: tuple[float, ...]) -> None:
        self.scores = list(scores)
        self.asked: list[int] = []
        self.at = 0

    def draw(self, n: int) -> Draw:
        self.asked.append(n)
        return [(f"g{self.at + i}", Task("t")) for i in range(n)]

    def play(self, tasks: Draw) -> list[Group]:
        out = []
        for name, _ in tasks:
            scores = self.scores[self.at % len(self.scores)]
            out.append(group(*(episode([s], domain=f"d{self.at % 2}") for s in scores), name=name))
            self.at += 1
        return out


def test_without_it_every_group_is_kept() -> None:
    source = Source(SOLVED, LIVE)
    got = collect(source.play, source.draw, groups=4)
    assert got.kept == [0, 1, 2, 3]
    assert got.metrics == {}


def test_what_cannot_teach_is_replaced() -> None:
    """Of four two are live; then two are asked for and one is live; then one, which is."""
    source = Source(SOLVED, LIVE, FAILED, LIVE, FAILED, LIVE, LIVE)
    got = collect(source.play, source.draw, groups=4, dynamic=True)
    assert source.asked == [4, 2, 1]
    assert got.kept == [1, 3, 5, 6]
    assert len(got.played) == 7  # all are logged and counted
    assert got.metrics == {"refills": 2.0, "groups_kept": 4.0}


def test_it_is_bounded_and_keeps_what_there_is() -> None:
    """Fault 43: with one live group in nine, four rounds end with what was found."""
    source = Source(*[FAILED] * 8, LIVE)
    got = collect(source.play, source.draw, groups=3, dynamic=True, max_refills=3)
    assert source.asked == [3, 3, 3, 2]
    assert got.kept == [8]
    assert got.metrics["refills"] == 3.0


def test_nothing_to_learn_says_the_solve_rates() -> None:
    source = Source(SOLVED, FAILED)  # domains d0 and d1 in turn
    got = collect(source.play, source.draw, groups=2, dynamic=True, max_refills=4)
    assert len(source.asked) == 5
    assert got.metrics == {"refills": 4.0, "groups_kept": 0.0}
    assert got.kept == [0, 1]  # they stand in for the ratio's sake; equal scores move nothing
    error = nothing_to_learn(got.played)
    assert not error.all_solved
    assert "10 groups" in str(error)
    assert "d0 100%, d1 0%" in str(error)


def test_solved_tasks_are_no_failure() -> None:
    source = Source(SOLVED)
    error = nothing_to_learn(collect(source.play, source.draw, groups=2, dynamic=True).played)
    assert error.all_solved
    assert "all solved" in str(error)


def test_the_widest_groups_are_kept() -> None:
    """Deviations .5, 0, .1, .4: the upper half, in their order; a quarter of four is one."""
    source = Source((1.0, 0.0), SOLVED, (0.2, 0.0), (0.8, 0.0))
    half = collect(source.play, source.draw, groups=4, keep=0.5)
    assert half.kept == [0, 3]
    assert half.metrics == {"groups_kept": 2.0}
    assert collect(source.play, source.draw, groups=4, keep=0.2).kept == [0]


def test_float_noise_is_no_spread() -> None:
    assert spread(group(*(episode([x]) for x in (0.1 + 0.2, 0.3, 0.3)))) == 0.0
    assert spread(group(episode([1.0]), episode([0.0]))) == 0.5
