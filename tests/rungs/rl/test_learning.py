"""Every algorithm learns: one lever of five pays, and after a few batches it is what the policy pulls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from spine import DIGIT_SYMBOLS, SIZES

from stepladder.errors import NothingToLearn
from stepladder.ladder import train
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display
from stepladder.types import Message, Reset, Step, Task

LEVERS = "01234"


class Levers:
    """Say "3"."""

    disjoint_splits = False

    def splits(self) -> tuple[str, ...]:
        return ("train", "test")

    def count(self, split: str) -> int:
        return 1000

    def get(self, split: str, i: int) -> Task:
        return Task(f"{split}/{i}", split, messages=(Message("user", "?"),), seed=i)

    def make(self) -> Any:
        return _Lever()

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        rng = random.Random(seed)
        return [[Message("user", "?"), Message("assistant", rng.choice(LEVERS))] for _ in range(count)]


class _Lever:
    inline = True

    async def reset(self, task: Task, *, seed: int) -> Reset:
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        return Step(reward=float(message.text == "3"), terminated=True)


def own_loss(logprobs: Any, proximal: Any, advantages: Any, mask: Any) -> Any:
    return -advantages[:, None] * logprobs * mask, {}


def success(tmp_path: Path, *settings: str) -> list[float]:
    data: dict[str, Any] = {
        "run": {"out": str(tmp_path), "threads": 1, "checkpoint_every": 100},
        "model": {"name": "tiny", "dtype": "float32", "options": {"symbols": list(DIGIT_SYMBOLS), **SIZES}},
        "environment": {"name": f"{__file__}:Levers"},
        "rollout": {"max_turns": 1, "max_tokens": 3, "max_context": 32},
        "sft": {"demonstrations": 64, "epochs": 6, "batch_size": 16, "learning_rate": 5e-3, "validation": 0},
        "rl": {
            "kl": {"coefficient": 0.0},
            "steps": 12,
            "tasks_per_step": 6,
            "group_size": 8,
            "learning_rate": 3e-3,
            "updates_per_batch": 2,
            "warmup_steps": 0,
        },
        "evaluation": {"raw": 0, "tasks": 1},
    }
    path = train(load_recipe(data, settings), display=Display(quiet=True))
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line["success"] for line in lines if line["phase"] == "rl"]


@pytest.mark.parametrize(
    "settings",
    [
        "rl.algorithm=reinforce rl.credit.baseline=0.2",
        "rl.algorithm=rloo rl.kl.coefficient=null",
        "rl.algorithm=reinforce++ rl.kl.coefficient=null",
        "rl.algorithm=reinforce++-baseline",
        "rl.algorithm=ppo rl.kl.coefficient=null rl.critic.learning_rate=3e-3",
        "rl.algorithm=ppo rl.critic.trunk=shared",
        "rl.algorithm=grpo rl.kl.coefficient=null",
        "rl.algorithm=dr_grpo",
        "rl.algorithm=dapo",
        "rl.algorithm=gspo rl.steps=30",
        "rl.algorithm=cispo",
        f"rl.algorithm=dr_grpo rl.loss={__file__}:own_loss",
    ],
)
def test_it_learns(tmp_path: Path, settings: str) -> None:
    seen = success(tmp_path, *settings.split())
    assert seen[0] < 0.4
    assert max(seen) > 0.65


class Paid(Levers):
    """Every answer is worth the same."""

    def __init__(self, worth: float) -> None:
        self.worth = worth

    def make(self) -> Any:
        return _Paid(self.worth)


class _Paid(_Lever):
    def __init__(self, worth: float) -> None:
        self.worth = worth

    async def step(self, message: Message) -> Step:
        return Step(reward=self.worth, terminated=True, info={"success": self.worth > 0.5})


ENDLESS = (
    "rl.tasks.dynamic_sampling=true",
    "rl.tasks.max_refills=1",
    "rl.tasks_per_step=2",
    "rollout.max_tokens=12",
)


def test_tasks_that_cannot_be_learned_end_the_run_with_their_solve_rate(tmp_path: Path) -> None:
    """Fault 43: every group earns 0. Bounded, and the message says why."""
    world = (f"environment.name={__file__}:Paid", "environment.options={ worth = 0.0 }")
    with pytest.raises(NothingToLearn, match=r"3 steps in a row.*Solve rates: default 0%"):
        success(tmp_path, *world, *ENDLESS)


def test_tasks_that_are_solved_end_the_rung_as_done(tmp_path: Path) -> None:
    world = (f"environment.name={__file__}:Paid", "environment.options={ worth = 1.0 }")
    seen = success(tmp_path, *world, *ENDLESS)
    assert len(seen) == 2  # the third dry step was not taken
    assert (tmp_path / "run" / "final").is_dir()
