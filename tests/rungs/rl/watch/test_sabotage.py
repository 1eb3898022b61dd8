"""Each fault is put into a real run on purpose; the run stops itself within two steps and names the cause."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from spine import digit_recipe

from stepladder.engines.local.engine import LocalEngine
from stepladder.errors import InvariantError
from stepladder.ladder import train
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy, Scores
from stepladder.recipe.config import Recipe
from stepladder.run.progress import Display
from stepladder.rungs.rl import loop as rl
from stepladder.rungs.rl import rung as rl_rung
from stepladder.rungs.rl import update as rl_step
from stepladder.types import Message, Reset, Step, Task
from stepladder.workbench.bench import Workbench


class Letters:
    """One turn; worth how often it says 0 and how long it is, so that siblings of a random policy differ."""

    inline = True
    tasks = staticmethod(lambda split: [{"prompt": f"{i}?"} for i in range(5)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        return Step(reward=message.text.count("0") + len(message.text) / 10, terminated=True)


def recipe(out: Path, *overrides: str) -> Recipe:
    return digit_recipe(
        out,
        "run",
        "sft=null",
        f"environment.name={__file__}:Letters",
        "rollout.max_tokens=6",
        "rl.steps=2",
        "evaluation.raw=0",
        "evaluation.tasks=2",
        *overrides,
    )


def run(out: Path, *overrides: str) -> Path:
    return train(recipe(out, *overrides), display=Display(quiet=True))


def stopped(out: Path, cause: str, *overrides: str) -> None:
    with pytest.raises(InvariantError, match=cause):
        run(out, *overrides)
    done = out / "run" / "metrics.jsonl"
    assert not done.exists() or len(done.read_text().splitlines()) <= 1  # the second step was not finished


GPT2 = 'model.options={arch="gpt2", symbols=["?", "S", "0", "1", "2", "3", "4"], hidden=32, layers=2}'


@pytest.mark.parametrize(
    "overrides", [("rollout.temperature=0.7", "rl.kl.coefficient=0.1"), (GPT2,)], ids=["llama", "gpt2"]
)
def test_nothing_is_stopped_without_a_fault(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    folder = run(tmp_path, *overrides)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


# -- the weight sync ---------------------------------------------------------------------------------------


def test_a_sync_that_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalEngine, "sync", lambda self, version: None)
    stopped(tmp_path, r"sync did not arrive: the engine is at version 0, the trainer at 1")


def test_a_sync_that_only_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: LocalEngine, version: int) -> None:
        self._worker.do(lambda: setattr(self._scheduler, "version", version))

    monkeypatch.setattr(LocalEngine, "sync", sync)
    stopped(tmp_path, r"sync did not arrive: the engine says version 1, but its weights are, bit for bit")


def test_a_sync_that_loses_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding stays behind: the fingerprint moves, the log-probabilities give it away."""
    whole = LocalEngine.sync
    kept: dict[str, Any] = {}
    made = rl_rung.RlRung.climb

    def climb(self: rl_rung.RlRung) -> None:
        kept["weight"] = self.run.bench.policy.lm.get_input_embeddings().weight
        kept["old"] = kept["weight"].detach().clone()
        made(self)

    def sync(self: LocalEngine, version: int) -> None:
        new = kept["weight"].detach().clone()
        kept["weight"].data.copy_(kept["old"])
        whole(self, version)
        kept["weight"].data.copy_(new)

    monkeypatch.setattr(rl_rung.RlRung, "climb", climb)
    monkeypatch.setattr(LocalEngine, "sync", sync)
    stopped(tmp_path, r"Cause: the weight sync did not arrive: the engine holds other weights")


# -- dropout -----------------------------------------------------------------------------------------------


def test_dropout_left_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    climb = rl_rung.RlRung.climb

    def dropping(self: rl_rung.RlRung) -> None:
        lm = self.run.bench.policy.lm
        for module in lm.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        lm.train()
        climb(self)

    monkeypatch.setattr(rl_rung.RlRung, "climb", dropping)
    stopped(tmp_path, r"Cause: dropout is left on in the trainer.*\(.*drop.* 0\.1", GPT2)


# -- the temperature ---------------------------------------------------------------------------------------


def test_a_temperature_that_the_engine_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = Workbench.agents
    monkeypatch.setattr(Workbench, "agents", lambda self, temperature: agents(self, 1.0))
    cause = r"Cause: the temperature is applied on one side only: .* at 1, the trainer scores them at 0\.6"
    stopped(tmp_path, cause, "rollout.temperature=0.6")


def test_a_temperature_that_the_trainer_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Policy.logprobs

    def plain(self: Policy, samples: Any, *, temperature: float = 1.0, **named: Any) -> Scores:
        return score(self, samples, **named)

    monkeypatch.setattr(Policy, "logprobs", plain)
    cause = (
        r"Cause: the temperature 0\.6 is applied on one side only: the trainer's scores do not depend on it"
    )
    stopped(tmp_path, cause, "rollout.temperature=0.6")


# -- the reference -----------------------------------------------------------------------------------------


def test_a_reference_that_shares_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_rung, "frozen_reference", lambda policy, path, must_exist: policy)
    stopped(tmp_path, "the reference is the trained policy: they share the storage", "rl.kl.coefficient=0.1")


def test_a_reference_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = MasterOptimizer.step
    copies: list[tuple[Policy, Policy]] = []

    def follow(policy: Policy, path: Path, must_exist: bool) -> Policy:
        reference = Policy(copy.deepcopy(policy.model), policy.tokenizer, mode=policy.mode)
        copies.append((policy, reference))
        return reference

    def both(self: MasterOptimizer, lr: float) -> float:
        norm = step(self, lr)
        for policy, reference in copies:
            reference.model.load_state_dict(policy.model.state_dict())
        return norm

    monkeypatch.setattr(rl_rung, "frozen_reference", follow)
    monkeypatch.setattr(MasterOptimizer, "step", both)
    stopped(tmp_path, "the reference is the trained policy: it moved with it", "rl.kl.coefficient=0.1")


def test_a_reference_whose_scores_are_the_policys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are frozen and never asked."""
    score = rl_step._reference
    climb = rl_rung.RlRung.climb
    policies: list[Policy] = []

    def remember(self: rl_rung.RlRung) -> None:
        policies.append(self.run.bench.policy)
        climb(self)

    monkeypatch.setattr(rl_rung.RlRung, "climb", remember)
    monkeypatch.setattr(
        rl_step,
        "_reference",
        lambda batch, rows, reference, temperature: score(batch, rows, policies[0], temperature),
    )
    stopped(tmp_path, "the KL of every token is exactly 0", "rl.kl.coefficient=0.1")


# -- the mask ----------------------------------------------------------------------------------------------


def test_an_inverted_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = rl.make_batch

    def inverted(*args: Any, **named: Any) -> Any:
        batch = make(*args, **named)
        batch.samples = [
            dataclasses.replace(
                s,
                mask=(False, *(not m for m in s.mask[1:])),
                turn_ids=(-1, *(0 if t < 0 else -1 for t in s.turn_ids[1:])),
            )
            for s in batch.samples
        ]
        return batch

    monkeypatch.setattr(rl, "make_batch", inverted)
    stopped(tmp_path, "the mask of trajectory .* is inverted, False on the sampled tokens")


def test_a_shifted_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = rl.make_batch

    def shifted(*args: Any, **named: Any) -> Any:
        batch = make(*args, **named)
        batch.samples = [dataclasses.replace(s, mask=(*s.mask[1:], False)) for s in batch.samples]
        return batch

    monkeypatch.setattr(rl, "make_batch", shifted)
    stopped(tmp_path, "the mask of trajectory .* is shifted or permuted")
