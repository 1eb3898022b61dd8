"""Does a critic make the policy gradient less noisy? Measured on fixed data, with a fixed policy.

    python bench/variance.py --out runs/variance --seeds 0 1 2

Eight turns, of which the first decides what is paid at the end, 1 or 2. PPO trains until it is right half
the time; there it is stopped. Its policy plays many batches. A fresh critic learns from one half of them; on
each batch of the other half two gradients are taken: REINFORCE without a baseline, and advantages from the
critic (GAE, λ = 1, no whitening, so that both mean the same gradient). Printed: the total variance of either
over batches, Σ_k Var g_k. Besides: the critic's explained variance along a whole PPO run. Writes
bench/results/variance.md and .svg.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from credit import BASE, WORLDS
from curves import curves, smooth, write
from runs import curve, run

from stepladder.algorithms import ALGORITHMS
from stepladder.config import load_recipe
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.rollout import rollout
from stepladder.sections.rl_parts import CriticSection
from stepladder.training.credit import Measured, make_batch
from stepladder.training.critic import Critic, explained_variance
from stepladder.training.rl_step import RlBatch, UpdateRules, rl_update
from stepladder.training.setup import Workbench, prepare
from stepladder.training.tasks import TaskSampler
from stepladder.training.turn_credit import CreditRules
from stepladder.types import Group

WORLD = {"name": f"{WORLDS}:Decisive", "options": {"luck": 0.0, "late": True}}
PPO = {**BASE, "environment": WORLD}
PPO["rl"] = {
    **BASE["rl"],
    "algorithm": "ppo",
    "learning_rate": 2e-4,
    "updates_per_batch": 2,
    "critic": {"learning_rate": 1e-3, "value_clip": 0.0, "lam": 1.0, "updates_per_batch": 4},
}
PLAIN = ALGORITHMS["reinforce"]
WITH_CRITIC = dataclasses.replace(PLAIN, name="reinforce with a critic", advantage="gae", needs_critic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/variance")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=24, help="of 64 episodes, for either half")
    parser.add_argument("--epochs", type=int, default=20, help="of the critic on its half")
    parser.add_argument("--set", nargs="*", default=[], help="overrides, to try things out")
    args = parser.parse_args()
    rows, explained = [], []
    for seed in args.seeds:
        seeded = [f"run.seed={seed}", *args.set]
        whole = run(args.out, f"whole-{seed}", PPO, [*seeded, "rl.stop_at_success=0.97"])
        explained.append(curve(whole, "explained_variance"))
        run(args.out, f"half-{seed}", PPO, [*seeded, "rl.stop_at_success=0.5"])
        plain, critic, knows = measure(Path(args.out) / f"half-{seed}" / "final", seed, args)
        best = max(v for _, v in smooth(explained[-1]))
        rows.append(
            f"| {seed} | {plain:.4g} | {critic:.4g} | {critic / plain:.2f} | {knows:.2f} | {best:.2f} |"
        )
        print(rows[-1], flush=True)
    write("variance.md", HEAD + "\n".join(rows) + "\n")
    picture = curves(
        {f"seed {s}": smooth(line) for s, line in zip(args.seeds, explained)},
        title="what PPO's critic explains of the returns, before it has seen them",
        x="episodes",
        y="explained variance (moving mean of 5 steps)",
        levels=[0.5],
        top=1.0,
    )
    write("variance.svg", picture)


def measure(model: Path, seed: int, args: Any) -> tuple[float, float, float]:
    """(variance of REINFORCE, with the critic, explained variance on the measured half)."""
    recipe = load_recipe(
        PPO, [f"model.name={model}", "model.options=null", f"run.seed={seed + 100}", *args.set]
    )
    with contextlib.closing(prepare(recipe)) as bench:
        batches = [play(bench, k) for k in range(2 * args.batches)]
        taught, measured = batches[: args.batches], batches[args.batches :]
        critic = Critic(bench.policy, CriticSection(value_clip=0.0), token_budget=8192, max_grad_norm=1.0)
        for _ in range(args.epochs):
            for groups in taught:
                critic.update(with_critic(critic, groups), rate=1e-3)
        optimizer = Keeping(bench.policy.trainable())
        plain = [gradient(bench, optimizer, make_batch(groups, PLAIN)) for groups in measured]
        judged = [with_critic(critic, groups) for groups in measured]
        less = [gradient(bench, optimizer, batch) for batch in judged]
        knows = sum(explained_variance(batch) for batch in judged) / len(judged)
        return total_variance(plain), total_variance(less), knows


def play(bench: Workbench, k: int) -> list[Group]:
    sampler = TaskSampler(bench.world, "train", mode="uniform", seed=k)
    return bench.runner.run(
        rollout(
            bench.agents(1.0), bench.world, sampler.next(64), group_size=1, limits=bench.limits, seed=1000 + k
        )
    )


def with_critic(critic: Critic, groups: list[Group]) -> RlBatch:
    def judge(batch: RlBatch) -> Measured:
        values, ends = critic.judge(batch)
        return Measured(values=values, final_values=ends)

    return make_batch(groups, WITH_CRITIC, CreditRules(lam=1.0), measure=judge)


class Keeping(MasterOptimizer):
    """Keeps the gradient of a step instead of taking it."""

    def step(self, lr: float) -> float:
        grads = [p.grad for p in self.masters.values() if p.grad is not None]
        self.seen = torch.cat([g.flatten().double() for g in grads])
        self.clear()
        return 0.0


def gradient(bench: Workbench, optimizer: Keeping, batch: RlBatch) -> torch.Tensor:
    rl_update(bench.policy, optimizer, batch, UpdateRules(row=PLAIN, token_budget=8192), learning_rate=0.0)
    return optimizer.seen


def total_variance(gradients: list[torch.Tensor]) -> float:
    """Σ over parameters of the variance over batches."""
    return float(torch.stack(gradients).var(dim=0).sum())


HEAD = """\
# Gradient variance with and without a critic

Made by `python bench/variance.py`. Eight turns, of which the first decides what is paid at the end, 1 or 2;
a policy that is right half the time; batches of 64 episodes, the same for both. Variance is summed over all
parameters. The last column is of a whole PPO run.

| seed | REINFORCE, no baseline | with the critic | ratio | explained there | explained, best of PPO's run |
|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
