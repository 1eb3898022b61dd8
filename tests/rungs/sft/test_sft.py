"""Supervised fine-tuning: when it stops, which weights it keeps, and where a resumed one goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spine import sample, tiny_policy

from stepladder.errors import DataError
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.recipe.sft import SftSection
from stepladder.rungs.epochs import EpochState, none_better, run_epochs
from stepladder.rungs.fitting import run_sft
from stepladder.types import TrainingSample


def text(start: int, group: str) -> TrainingSample:
    return sample([20, *range(start, start + 4)], 1, trajectory=group, group=group)


TRAIN = [text(30 + i, f"t{i}") for i in range(5)]
SAME, OTHER = [text(31, "h")], [text(70, "h")]  # helped and hurt by training


class Run:
    """run_sft with what it logged."""

    def __init__(self, policy: Policy, state: EpochState | None = None) -> None:
        self.policy, self.state = policy, state or EpochState()
        self.optimizer = MasterOptimizer(policy.trainable())
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.epochs: list[int] = []

    def go(self, held_out: list[TrainingSample], **settings: Any) -> EpochState:
        section = SftSection(demonstrations=5, batch_size=2, warmup_steps=0, **settings)
        return run_sft(
            self.policy,
            self.optimizer,
            TRAIN,
            held_out,
            section,
            self.state,
            seed=0,
            on_step=self._on_step,
            on_epoch=self._on_epoch,
        )

    def _on_step(self, step: int, metrics: dict[str, float]) -> None:
        if "validation_loss" in metrics:
            self.losses.append(metrics["validation_loss"])
        else:
            self.steps.append(step)

    def _on_epoch(self, state: EpochState) -> None:
        self.epochs.append(state.epoch)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.trainable().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_all_epochs_while_the_loss_falls(policy: Policy) -> None:
    run = Run(policy)
    state = run.go(SAME, epochs=3, learning_rate=1e-3)
    assert run.steps == list(range(1, 10))  # three batches an epoch: 2 + 2 + 1
    assert run.epochs == [1, 2, 3]
    assert run.losses[0] > run.losses[1] > run.losses[2]
    assert state.best_epoch == 3
    assert state.best_loss == run.losses[2]


def test_it_stops_after_patience_and_keeps_the_weights_it_began_with() -> None:
    """From nearly uniform predictions every epoch makes the held-out text less likely, so the model before
    SFT is the best one."""
    policy = tiny_policy(scale=0.0)
    before = weights(policy)
    run = Run(policy)
    state = run.go(OTHER, epochs=9, learning_rate=1e-2, patience=2)
    assert run.epochs == [1, 2]
    assert state.best_epoch == 0
    assert state.best_loss is not None
    assert min(run.losses) > state.best_loss
    assert equal(weights(policy), before)


def test_too_small_an_improvement_ends_training_and_is_kept(policy: Policy) -> None:
    """Three epochs, each a little better: none counts for patience, and the last weights stay."""
    run, before = Run(policy), weights(policy)
    state = run.go(SAME, epochs=9, learning_rate=1e-3, patience=3, min_improvement=100.0)
    assert run.epochs == [1, 2, 3]
    assert state.best_epoch == 3
    assert state.best_loss == run.losses[2] < run.losses[1] < run.losses[0]
    assert state.mark_epoch == 0
    assert not equal(weights(policy), before)
    assert none_better(state) == ""


@pytest.mark.parametrize(
    ("losses", "patience", "epochs", "best", "mark"),
    [  # by min_improvement = 0.5; the first number is before any training
        ([5.0, 4.0, 3.9, 3.8, 0.0], 2, 3, 3, 1),  # two small steps below 4.0 in a row
        ([5.0, 4.0, 3.7, 3.4, 3.6, 3.5, 0.0], 2, 5, 3, 3),  # small ones that add up to 0.6 count
        ([5.0, 4.9, 5.1, 0.0], 2, 2, 1, 0),
        ([5.0, 5.1, 5.0, 0.0], 2, 2, 0, 0),
    ],
)
def test_the_mark_decides_patience_and_the_lowest_loss_the_weights(
    losses: list[float], patience: int, epochs: int, best: int, mark: int
) -> None:
    policy, told = tiny_policy(), iter(losses)
    optimizer = MasterOptimizer(policy.trainable())
    settings = SftSection(demonstrations=1, epochs=9, patience=patience, min_improvement=0.5)
    seen: list[dict[str, float]] = []

    def update(rows: list[int], step: int) -> dict[str, float]:
        for p in policy.trainable().values():
            p.data.fill_(step + 1)  # the weights tell their epoch
        return {}

    state = run_epochs(
        optimizer,
        settings,
        EpochState(),
        batches=lambda epoch: [[0]],
        update=update,
        validate=lambda: {"validation_loss": next(told)},
        on_step=lambda step, metrics: seen.append(metrics),
        on_epoch=lambda state: None,
    )
    assert (state.epoch, state.best_epoch, state.mark_epoch) == (epochs, best, mark)
    assert [m["best_epoch"] for m in seen if "best_epoch" in m][-1] == best
    if best:
        assert all((p == best).all() for p in policy.trainable().values())
        assert none_better(state) == ""
    else:
        assert none_better(state, "round") == (
            "no epoch was better; the weights are those the round began with"
        )


def test_without_held_out_samples_all_epochs_are_run_and_the_last_weights_kept(policy: Policy) -> None:
    before = weights(policy)
    run = Run(policy)
    state = run.go([], epochs=2, learning_rate=1e-3)
    assert run.epochs == [1, 2]
    assert state.best_loss is None
    assert not state.best
    assert not equal(weights(policy), before)


@pytest.mark.parametrize(("held_out", "least"), [(SAME, 0.005), (OTHER, 0.005), (SAME, 100.0)])
def test_killed_after_its_last_epoch_it_begins_no_other(held_out: list[TrainingSample], least: float) -> None:
    """A checkpoint is taken at each epoch's end, before the loop knows whether it was the last."""
    quiet = Run(tiny_policy())
    quiet.go(held_out, epochs=4, learning_rate=1e-2, patience=2, min_improvement=least)
    for killed in quiet.epochs:
        run = Run(tiny_policy())
        saved: dict[str, Any] = {}

        def on_epoch(
            state: EpochState, at: int = killed, own: Run = run, out: dict[str, Any] = saved
        ) -> None:
            if state.epoch == at:
                tensors = {name: t.clone() for name, t in own.optimizer.tensors().items()}
                out.update(plain=state.plain(), tensors=tensors, best=dict(state.best))
                raise KeyboardInterrupt

        run._on_epoch = on_epoch  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.go(held_out, epochs=4, learning_rate=1e-2, patience=2, min_improvement=least)
        rest = Run(tiny_policy(seed=5), EpochState(**saved["plain"], best=saved["best"]))
        rest.optimizer.load(saved["tensors"])
        rest.go(held_out, epochs=4, learning_rate=1e-2, patience=2, min_improvement=least)
        assert rest.epochs == quiet.epochs[killed:]
        assert equal(weights(rest.policy), weights(quiet.policy))


def test_an_empty_dataset_is_refused(policy: Policy) -> None:
    with pytest.raises(DataError, match="give at least one"):
        run_sft(
            policy,
            MasterOptimizer(policy.trainable()),
            [],
            [],
            SftSection(demonstrations=1),
            EpochState(),
            seed=0,
            on_step=lambda step, metrics: None,
            on_epoch=lambda state: None,
        )
