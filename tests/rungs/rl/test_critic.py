"""The critic: what it judges, what it learns, and that its numbers reach the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from spine import sample, tiny_policy
from torch import Tensor

from stepladder.algorithms import ALGORITHMS
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.recipe.rl_credit import CriticSection
from stepladder.rungs.rl.critic import Critic, explained_variance
from stepladder.rungs.rl.update import RlBatch, UpdateRules, rl_update
from stepladder.types import TrainingSample

SAMPLES = [
    sample([8, 9, 10, 11, 12], 2, trajectory="a", group="g"),
    sample(
        [8, 9, 20, 21, 22, 23], 2, trajectory="b", group="g", mask=[False, False, True, False, False, True]
    ),
    sample([30, 31, 32], 1, trajectory="b", group="g"),  # b goes on after its history was rewritten
]


def batch(samples: list[TrainingSample] = SAMPLES) -> RlBatch:
    return RlBatch(samples, torch.zeros(3), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]))


def critic(policy: Any, *, budget: int = 4096, **settings: Any) -> Critic:
    made = Critic(policy, CriticSection(**settings), token_budget=budget, max_grad_norm=1.0)
    with torch.no_grad():
        made.model.score.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    return made


def mask() -> Tensor:
    out = torch.zeros(3, 6, dtype=torch.bool)
    for b, s in enumerate(SAMPLES):
        out[b, : len(s.mask)] = torch.tensor(s.mask)
    return out


@pytest.mark.parametrize("budget", [4096, 6])
@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_values_stand_before_their_tokens_and_ends_after_the_last(budget: int, trunk: str) -> None:
    judge = critic(tiny_policy(), budget=budget, trunk=trunk)
    values, ends = judge.judge(batch())
    with torch.no_grad():
        wanted = judge.model.token_values(SAMPLES)
        last, _ = judge.model.at(SAMPLES, [[4], [5], [2]])
    assert torch.allclose(values, wanted, atol=1e-5)
    assert not values[~mask()].any()
    assert ends.tolist() == pytest.approx([float(last[0]), float(last[2])], abs=1e-5)  # b's second sample


def test_a_fresh_critic_says_nothing() -> None:
    made = Critic(tiny_policy(), CriticSection(), token_budget=64, max_grad_norm=1.0)
    assert not made.judge(batch())[0].any()


def judged(judge: Critic, returns: Tensor) -> RlBatch:
    data = batch()
    data.values, _ = judge.judge(data)
    data.returns = returns
    return data


def test_it_learns_the_returns_and_leaves_the_policy_alone() -> None:
    policy = tiny_policy()
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    judge = critic(policy, value_clip=0.0)
    goal = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) * mask()
    first = explained_variance(judged(judge, goal))
    losses = [judge.update(judged(judge, goal), rate=3e-3)["value_loss"] for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    assert first < 0.0
    assert explained_variance(judged(judge, goal)) > 0.9
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable().items())


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut() -> None:
    goal = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) * mask()
    seen = []
    for budget in (4096, 6):
        judge = critic(tiny_policy(), budget=budget)
        judge.update(judged(judge, goal), rate=0.0)
        assert judge.optimizer is not None
        judge.optimizer.adam.zero_grad()
        data = judged(judge, goal)
        of = judge.loss(data, coefficient=1.0)
        rows = [[0, 1, 2]] if budget == 4096 else [[0], [1, 2]]
        for chunk in rows:
            of(chunk)[0].backward()  # type: ignore[no-untyped-call]
        seen.append(judge.model.score.weight.grad.clone())
    assert torch.allclose(seen[0], seen[1], atol=1e-6)


def test_a_shared_trunk_is_trained_by_both_losses() -> None:
    """No advantage: what moves the policy's body is the value loss alone, times its coefficient."""
    policy = tiny_policy()
    judge = critic(policy, trunk="shared", coefficient=0.5)
    goal = torch.ones(3, 6) * mask()
    data = judged(judge, goal)
    optimizer = MasterOptimizer(judge.model.trainable(), max_grad_norm=1e9)
    assert "score.weight" in optimizer.parameters
    row = dataclasses.replace(ALGORITHMS["ppo"], kl_in="none")
    metrics = rl_update(
        policy,
        optimizer,
        data,
        UpdateRules(row=row),
        learning_rate=1e-4,
        also=judge.loss(data, coefficient=0.5),
    )
    values = data.values
    assert values is not None
    half = 0.5 * ((values - goal)[mask()] ** 2).mean()
    assert metrics["loss"] == pytest.approx(0.5 * float(half), rel=1e-4)
    assert metrics["updated"] == 1.0
    moved, _ = judge.judge(batch())
    assert float(((moved - goal)[mask()] ** 2).mean()) < float(2 * half)


def test_its_state_goes_into_a_checkpoint_and_back() -> None:
    goal = torch.ones(3, 6) * mask()
    one = critic(tiny_policy())
    one.update(judged(one, goal), rate=1e-2)
    saved = {n: t.clone() for n, t in one.tensors().items()}
    other = critic(tiny_policy(seed=1))
    other.load(saved)
    for judge in (one, other):
        judge.update(judged(judge, goal), rate=1e-2)
    assert all(torch.equal(t, other.tensors()[n]) for n, t in one.tensors().items())
