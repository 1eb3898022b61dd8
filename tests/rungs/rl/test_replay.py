"""Demonstrations mixed into RL: the gradient adds up, what was shown is held, a resumed run is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import Crash, at_call, crash
from spine import assert_same, digit_recipe, gradients, lines, sample, tiny_policy

from stepladder import ladder
from stepladder.algorithms import ALGORITHMS
from stepladder.errors import ConfigError
from stepladder.policies.optimizer import MasterOptimizer, trainable
from stepladder.run.progress import Display
from stepladder.rungs.rl import loop as rl
from stepladder.rungs.rl.replay import Replay
from stepladder.rungs.rl.update import RlBatch, UpdateRules, rl_update
from stepladder.rungs.supervised import sft_gradients, validation_loss
from stepladder.types import TrainingSample

RULES = UpdateRules(row=ALGORITHMS["reinforce"])
SHOWN = [sample((9, 10, 11, 12), 2, trajectory="d"), sample((9, 13, 14, 15, 16), 3, trajectory="e")]


class _Kept(MasterOptimizer):
    """An optimiser that leaves gradients where they are."""

    def __init__(self) -> None: ...

    def step(self, learning_rate: float) -> float:
        return 0.0


def batch() -> RlBatch:
    samples: list[TrainingSample] = [
        sample((8, 9, 20, 21), 2, trajectory="a", group="g"),
        sample((8, 9, 22), 2, trajectory="b", group="g"),
    ]
    index = torch.arange(2)
    return RlBatch(samples, torch.tensor([1.0, -0.5]), index, torch.zeros(2, dtype=torch.long))


def updated(policy: Any, optimizer: Any, replay: Replay | None, step: int = 0, rate: float = 0.0) -> Any:
    return rl_update(
        policy,
        optimizer,
        batch(),
        RULES,
        learning_rate=rate,
        replay=replay.at(step, 0) if replay else None,
    )


def test_the_gradient_is_the_sum() -> None:
    """g(RL with replay) = g(RL) + .3 g(SFT), parameter by parameter."""
    policy = tiny_policy()
    replay = Replay(policy, SHOWN, weight=0.3, size=2, token_budget=1000, seed=0)
    metrics = updated(policy, _Kept(), replay)
    both = gradients(policy)
    updated(policy, _Kept(), None)
    alone = gradients(policy)
    shown = sft_gradients(policy, SHOWN, token_budget=1000)
    imitated = gradients(policy)
    assert metrics["replay_loss"] == pytest.approx(shown["loss"])
    for name, gradient in both.items():
        assert torch.allclose(gradient, alone[name] + 0.3 * imitated[name], atol=1e-6), name


def test_a_step_without_signal_replays_nothing() -> None:
    policy = tiny_policy()
    dead = batch()
    dead.advantages.zero_()

    def never() -> dict[str, float]:
        raise AssertionError

    got = rl_update(policy, _Kept(), dead, RULES, learning_rate=0.1, replay=never)
    assert got["updated"] == 0.0


def test_it_holds_what_rl_would_unlearn() -> None:
    """Thirty steps towards another continuation: the demonstrated loss rises without replay, not with it."""

    def after(weight: float) -> float:
        policy = tiny_policy(seed=2)
        optimizer = MasterOptimizer(trainable(policy.model), max_grad_norm=1.0)
        replay = Replay(policy, SHOWN, weight, size=2, token_budget=1000, seed=0) if weight else None
        for step in range(30):
            updated(policy, optimizer, replay, step, rate=3e-3)
        optimizer.close()
        return validation_loss(policy, SHOWN, token_budget=1000)

    before = validation_loss(tiny_policy(seed=2), SHOWN, token_budget=1000)
    without, held = after(0.0), after(1.0)
    assert without > before
    assert held < before


def test_a_run_replays_its_demonstrations_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying = ("rl.replay.weight=0.5", "rl.replay.batch=4", "rl.updates_per_batch=2")

    def recipe(name: str) -> Any:
        return digit_recipe(tmp_path, name, *replaying)

    calm = ladder.train(recipe("calm"), display=Display(quiet=True))
    assert any("replay_loss" in m for m in lines(calm / "metrics.jsonl"))
    with monkeypatch.context() as patch:
        at_call(patch, rl, "rl_update", 5, crash, after=True)
        with pytest.raises(Crash):
            ladder.train(recipe("run"), display=Display(quiet=True))
    ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert_same(tmp_path / "run", calm)


def test_there_must_be_something_to_replay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \[sft\]"):
        digit_recipe(tmp_path, "run", "rl.replay.weight=0.5", "sft=null")


def test_a_checkpoint_is_trained_on_with_rows_that_are_only_replayed(tmp_path: Path) -> None:
    """`sft.epochs = 0`: no step of SFT and no evaluation after it; the rows are said and replayed."""
    start = ladder.train(digit_recipe(tmp_path, "start", "rl=null"), display=Display(quiet=True))
    checkpoint = (f"model.name={start / 'final'}", "model.options={}")
    replaying = ("sft.epochs=0", "rl.replay.weight=0.5", "rl.replay.batch=4")
    run = ladder.train(digit_recipe(tmp_path, "run", *checkpoint, *replaying), display=Display(quiet=True))
    metrics = lines(run / "metrics.jsonl")
    assert {m["phase"] for m in metrics} == {"rl"}
    assert any("replay_loss" in m for m in metrics)
    assert [e["rung"] for e in lines(run / "evaluations.jsonl") if e["rung"] != "raw"] == ["rl"]
    assert "demonstrations of the environment" in json.loads((run / "data.json").read_text())["sft"]["text"]


def test_rows_that_nothing_replays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.epochs=0 .* nothing replays them; set rl\.replay\.weight"):
        digit_recipe(tmp_path, "run", "sft.epochs=0")
