"""Paired comparisons, calibration, the page, and the command, on answers that are known."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from spine import digit_recipe, lines

from stepladder.commands.evaluate import evaluate_model
from stepladder.commands.evaluation_text import comparison_text
from stepladder.environments.environment import as_world
from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation, evaluate, held_out
from stepladder.evaluation.asked import Asked
from stepladder.evaluation.beam import Beam
from stepladder.evaluation.calibration import calibration
from stepladder.evaluation.compare import by_domain, compare, sign_test
from stepladder.evaluation.result import Sample, TaskSamples
from stepladder.evaluation.summary import Played, summarised
from stepladder.ladder import train
from stepladder.objectives.reward_model import calibration_error
from stepladder.play.agent import Act, Record
from stepladder.play.player import Player
from stepladder.play.rollout import Limits
from stepladder.rewards.reward import as_reward
from stepladder.run.progress import Display
from stepladder.types import Message, Reset, Step, Task


def tasks(*solved: tuple[bool, ...], domain: str = "d") -> list[TaskSamples]:
    return [
        TaskSamples(f"{domain}{i}", domain, tuple(Sample(s, "x" if s else "y") for s in row))
        for i, row in enumerate(solved)
    ]


def test_mcnemar_by_hand() -> None:
    """Better on 8 tasks, worse on 2: 2 * (1 + 10 + 45)/1024 = .109375, however many are equal."""
    assert sign_test(8, 2) == pytest.approx(2 * 56 / 1024)
    assert sign_test(2, 8) == sign_test(8, 2)
    assert sign_test(3, 3) == 1.0


@given(st.integers(0, 30), st.integers(0, 30))
def test_the_p_value_is_one(better: int, worse: int) -> None:
    """Under the null, the chance of a result at least as uneven: it counts every such outcome."""
    n, gap = better + worse, abs(better - worse)
    outcomes = sum(math.comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= gap)
    assert sign_test(better, worse) == pytest.approx(outcomes / 2**n)


def test_pairing_sees_what_two_intervals_do_not() -> None:
    """100 tasks, 50 and 56 solved, the same 50 among them: six better, none worse.

    The intervals of 50 % and 56 % overlap widely; p = 2/64 = .03125, and the bootstrap stays above 0.
    """
    one = tasks(*[(i < 56,) for i in range(100)])
    other = tasks(*[(i < 50,) for i in range(100)])
    c = compare(one, other)
    assert (c.better, c.worse, c.equal) == (6, 0, 94)
    assert c.p == pytest.approx(2 / 64)
    assert c.difference == pytest.approx(0.06)
    assert 0 < c.interval[0] < 0.06 < c.interval[1] < 0.12


def test_other_tasks_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match="same tasks"):
        compare(tasks((True,)), tasks((True,), domain="e"))


def test_what_was_gained_here_and_lost_there() -> None:
    one = tasks(*[(True,)] * 20) + tasks(*[(False,)] * 20, domain="e")
    other = tasks(*[(False,)] * 20) + tasks(*[(True,)] * 20, domain="e")
    found = by_domain(one, other)
    assert (found["d"].difference, found["e"].difference) == (1.0, -1.0)
    assert compare(one, other).difference == 0.0


def test_calibration_by_hand() -> None:
    """Two tasks: 3 of 4 votes and right, 2 of 4 and wrong (one of the four said nothing).

    Bins .7-.8 (|1 - .75|) and .5-.6 (|0 - .5|), half the tasks each: ECE .375; gap (.75 + .5 - 1)/2.
    """
    sure = TaskSamples("0", "d", (*[Sample(True, "a")] * 3, Sample(False, "b")))
    unsure = TaskSamples("1", "d", (*[Sample(False, "b")] * 2, Sample(True, "a"), Sample(False, None)))
    c = calibration([sure, unsure])
    assert c.ece == pytest.approx(0.375)
    assert c.gap == pytest.approx(0.125)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=20))
def test_ece_is_the_objectives_own(rows: list[tuple[int, bool]]) -> None:
    made = []
    for i, (votes, right) in enumerate(rows):
        own = [Sample(right, "a")] * votes + [Sample(False, None)] * (8 - votes)
        made.append(TaskSamples(str(i), "d", tuple(own)))
    shares = torch.tensor([v / 8 for v, _ in rows], dtype=torch.float64)
    outcomes = torch.tensor([right and v > 0 for v, right in rows])
    assert calibration(made).ece == pytest.approx(float(calibration_error(shares, outcomes)))


# -- playing ---------------------------------------------------------------------------------------------


class Shaky:
    """Every second episode of a task fails on its first try; the answer "4" is right."""

    inline = True
    tries = 0
    tasks = staticmethod(lambda split: [{"prompt": f"{i}?"} for i in range(3)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        Shaky.tries += 1
        if Shaky.tries % 2 == 0:
            raise OSError("gone")
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        return Step(reward=float(message.text == "4"), terminated=True)


class Voter:
    """Says "4" or "5" by its seed."""

    def __init__(self, key: str) -> None:
        self.seen: list[Message] = []

    def begin(self, messages: Any, tools: Any) -> None:
        self.seen = list(messages)

    async def act(self, seed: int) -> Act:
        message = Message("assistant", "4" if seed % 3 else "5")
        self.seen.append(message)
        return Act(message, "stop")

    def observe(self, messages: Any) -> None: ...

    def record(self, trajectory_id: str, group_id: str) -> Record:
        return Record(tuple(self.seen))

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        return text, len(text)

    def close(self) -> None: ...


def likes_3(messages: Sequence[Message], partials: Sequence[str]) -> list[float]:
    """A step scorer: answers with a 3 first."""
    return [float("3" in p) for p in partials]


def long_answer(answer: str) -> float:
    """A reward that knows nothing but prefers 5."""
    return float(answer == "5")


def test_failed_episodes_are_tried_again_and_stay_in_their_group() -> None:
    Shaky.tries = 0
    world = as_world(Shaky)
    chosen = held_out(world, "test", 3)
    player = Player(lambda temperature: Voter, world, Limits(), None, 0.0)
    reward = as_reward(long_answer)
    result = asyncio.run(evaluate(player, chosen, samples=4, temperature=0.0, seed=0, reward=reward))
    assert Shaky.tries == 12 + 6
    assert [len(t.samples) for t in result.tasks] == [4, 4, 4]
    assert [t.task for t in result.tasks] == [t.id for t in chosen]
    assert [t.task.id for t in result.trajectories] == [t.id for t in chosen for _ in range(4)]
    samples = [s for t in result.tasks for s in t.samples]
    assert sum(s.failed for s in samples) == result.failed == 3  # every second of the six retries failed
    for s in samples:
        if s.failed:
            assert (s.solved, s.answer, s.score) == (False, None, None)
        else:
            assert s.solved == (s.answer == "4")  # success is the environment's, not the reward's
            assert s.score == float(s.answer == "5")


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --temperature"):
        Asked("calculator", samples=4, temperature=0.0)
    with pytest.raises(ConfigError, match="--samples 16"):
        Asked("calculator", samples=4, ks=(1, 16))
    with pytest.raises(ConfigError, match="needs both --beam"):
        Asked("calculator", step_scorer="a:b")
    with pytest.raises(ConfigError, match="16 samples at temperature 0"):
        Asked("calculator", beam=Beam(16, 4), step_scorer="a:b", temperature=0.0)
    with pytest.raises(ConfigError, match="the model itself"):
        evaluate_model("a", Asked("calculator"), against="a")
    assert Asked("calculator", samples=6).counts == (1, 2, 4, 6)


def test_two_runs_are_compared_on_the_same_tasks(tmp_path: Path) -> None:
    """A trained model of the hidden digit against one step of it: table, JSON, page and plots."""
    short = ("rl=null", "evaluation.raw=0", "evaluation.tasks=2")
    one, other = (
        train(digit_recipe(tmp_path, name, *short, f"sft.epochs={epochs}"), display=Display(quiet=True))
        for name, epochs in (("one", 8), ("other", 1))
    )
    console = Console(record=True, width=120, file=io.StringIO())
    asked = Asked(
        "hidden_digit", tasks=6, samples=4, budgets=(2, 3), reward=f"{__file__}:long_answer", ks=(1, 4)
    )
    evaluate_model(
        str(one), asked, against=str(other), out=tmp_path / "t.jsonl", report=tmp_path / "r", console=console
    )
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2 * 2 * 6 * 4
    summary = json.loads((tmp_path / "r" / "evaluation.json").read_text())
    assert summary["samples"] == 4
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "evaluation.json", "evaluation.html", "samples.svg", "budgets.svg",
    }  # fmt: skip
    page = (tmp_path / "r" / "evaluation.html").read_text()
    assert "<script" not in page
    assert page.count("<svg") == 2
    assert [(p["budget"], set(p["curves"])) for p in summary["played"]] == [
        (budget, {"pass", "maj", "best", "weighted"}) for budget in (2, 3, 2, 3)
    ]
    assert [c["budget"] for c in summary["comparisons"]] == [2, 3]
    beam = Beam(16, 4, step_tokens=1)
    led = Asked("hidden_digit", tasks=4, seed=1, beam=beam, step_scorer=f"{__file__}:likes_3")
    evaluate_model(str(one), led, out=tmp_path / "led.jsonl", console=Console(file=io.StringIO()))
    said = [line["messages"][-1]["content"] for line in lines(tmp_path / "led.jsonl")]
    assert len(said) == 4
    assert all("3" in text for text in said)
    text = console.export_text()
    assert "exact sign test" in text
    assert "weighted@k" in text


@pytest.mark.parametrize(
    ("trained", "base", "said"),
    [
        # Trained: 4 and 0 of 4 right, pass@k = 1/2. Base: 1 and 1 of 4, pass@1 = 1/4, pass@2 = 1 - 3/6 = 1/2.
        ((4, 0), (1, 1), ["pass@4: rl 50.0%, base 100.0%, difference -50.0", "with rl at k = 2"]),
        ((4, 3), (1, 0), ["pass@4: rl 100.0%, base 50.0%", "base is behind rl at every k from 1 to 4: no"]),
        ((2, 2), (4, 0), ["pass@4: rl 100.0%, base 50.0%", "neither is ahead at k = 1"]),
    ],
)
def test_the_crossover_of_pass_at_k_is_said_in_any_case(
    trained: tuple[int, ...], base: tuple[int, ...], said: list[str]
) -> None:
    """Of every k, not of those that are printed."""
    asked = Asked("calculator", samples=4, ks=(1, 4), tasks=2)
    played = [
        Played(name, None, Evaluation(tuple(rows), (), (0.0, 1.0), 1.0, 0.0))
        for name, solved in (("rl", trained), ("base", base))
        for rows in [tasks(*[tuple(i < n for i in range(4)) for n in solved])]
    ]
    (comparison,) = summarised(played, asked)["comparisons"]
    for line, part in zip(comparison_text(comparison)[-2:], said, strict=True):
        assert part in line


def test_tasks_that_all_differ_by_the_same_leave_room_for_others() -> None:
    """Wilson's upper end of 0 in 10 is z²/(10 + z²) = 3.8415/13.8415 = .2775;
    a bootstrap would have no width."""
    right, wrong = (
        [TaskSamples(str(i), "d", (Sample(solved, "4"),)) for i in range(10)] for solved in (True, False)
    )
    assert compare(right, right).interval == pytest.approx((-0.2775, 0.2775), abs=1e-4)
    assert compare(right, wrong).interval == pytest.approx((0.7225, 1.0), abs=1e-4)
