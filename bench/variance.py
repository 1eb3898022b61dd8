"""Does a critic make the policy gradient less noisy? MeasuredColumns on fixed data, with a fixed policy.

    python bench/variance.py --out runs/variance --seeds 0 1 2

The policy is fixed after SFT: it answers random digits. It plays many episodes. A critic learns the returns
of two thirds of them; for each of the other episodes three policy gradients are taken: from the return
itself (REINFORCE without a baseline), from the return less the mean return of the two thirds, and from the
return less the critic's values (GAE, λ = 1, no whitening: all three mean the same gradient). The variance
of a batch's mean gradient is that of one episode's over the size of the batch, so ratios are those of
batches of any size. Besides: what PPO's critic explains along a whole run. Writes bench/results/variance.md
and .svg.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from credit import BASE
from curves import curves, smooth, write
from runs import curve, run

from stepladder.algorithms import ALGORITHMS
from stepladder.play.rollout import rollout
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.recipe.config import load_recipe
from stepladder.recipe.rl_credit import CriticSection
from stepladder.rungs.rl.credit import MeasuredColumns, make_batch
from stepladder.rungs.rl.critic import Critic, explained_variance
from stepladder.rungs.rl.turn_credit import CreditRules
from stepladder.rungs.rl.update import RlBatch, UpdateRules, rl_update
from stepladder.rungs.tasks import TaskSampler
from stepladder.types import Group
from stepladder.workbench.bench import Workbench
from stepladder.workbench.prepare import prepare

WORLD = f"{Path(__file__).parent / 'variance_world.py'}:Late"
RIGHT_ONE_IN_FIVE = {"right": 4.0, "wrong": -1.0}  # mean 0 for a policy that answers random digits
REGIMES: dict[str, dict[str, Any]] = {
    "8 turns, 0 or 1": {},
    "1 turn, 0 or 1": {"turns": 1},
    "1 turn, -1 or 4": {"turns": 1, **RIGHT_ONE_IN_FIVE},
}
SFT = {**BASE["sft"], "demonstrations": 256, "epochs": 12, "learning_rate": 3e-3}
PPO_KEYS = {
    "algorithm": "ppo",
    "learning_rate": 3e-4,
    "updates_per_batch": 2,
    "steps": 40,
    "stop_at_success": 0.8,
    "critic": {"learning_rate": 1e-3, "value_clip": 0.0, "lam": 1.0, "updates_per_batch": 4},
}
PLAIN = ALGORITHMS["reinforce"]
WITH_CRITIC = dataclasses.replace(PLAIN, name="reinforce with a critic", advantage="gae", needs_critic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="runs/variance")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--episodes", type=int, default=256, help="of which gradients are taken; the critic has twice as many"
    )
    parser.add_argument("--epochs", type=int, default=12, help="of the critic on its half")
    parser.add_argument("--only", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--without-ppo", action="store_true", help="leave the whole runs of PPO out")
    parser.add_argument("--set", nargs="*", default=[], help="overrides, to try things out")
    args = parser.parse_args()
    rows, lines, best = [], {}, []
    for seed in args.seeds:
        for name in args.only:
            rows.append(f"| {name} | {seed} | {known(name, seed, args)} |")
            print(rows[-1], flush=True)
    for seed in [] if args.without_ppo else args.seeds:
        recipe = {**recipe_of({}), "rl": {**BASE["rl"], **PPO_KEYS}}
        found = run(args.out, f"ppo-{seed}", recipe, [f"run.seed={seed}", *args.set])
        lines[f"seed {seed}"] = smooth(curve(found, "explained_variance"))
        top, success = max(v for _, v in lines[f"seed {seed}"]), curve(found, "success")
        best.append(f"| {seed} | {success[0][1]:.2f} | {success[-1][1]:.2f} | {top:.2f} | {len(found)} |")
        print(best[-1], flush=True)
    rows.sort(key=lambda row: list(REGIMES).index(row.split(" | ")[0].removeprefix("| ")))
    write("variance.md", "\n".join([HEAD, *rows, *([BETWEEN, *best] if best else []), END]))
    if not lines:
        return
    picture = curves(
        lines,
        title="what PPO's critic explains of the returns, before it has seen them",
        x="episodes",
        y="explained variance (moving mean of 5 steps)",
        levels=[0.5],
        top=1.0,
    )
    write("variance.svg", picture)


def recipe_of(options: dict[str, Any]) -> dict[str, Any]:
    """SFT on random digits."""
    kept = {k: v for k, v in BASE.items() if k != "rl"}
    return {**kept, "environment": {"name": WORLD, "options": options}, "sft": SFT}


def known(name: str, seed: int, args: Any) -> str:
    """`measure`, or what an earlier call with the same settings has left."""
    label = (
        f"{list(REGIMES).index(name)}-{seed}-{args.episodes}-{args.epochs}-{'-'.join(args.set) or 'plain'}"
    )
    path = Path(args.out) / f"measured-{label}.txt"
    if not path.is_file():
        cells = measure(name, seed, args)
        path.write_text(cells, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def measure(name: str, seed: int, args: Any) -> str:
    """The cells of a row: success, variances, both ratios with their intervals, explained variance."""
    recipe, label = recipe_of(REGIMES[name]), f"sft-{list(REGIMES).index(name)}-{seed}"
    run(args.out, label, recipe, [f"run.seed={seed}", *args.set])
    fixed = [f"model.name={Path(args.out) / label / 'final'}", "model.options=null", f"run.seed={seed + 100}"]
    with contextlib.closing(prepare(load_recipe(recipe, [*fixed, *args.set]))) as bench:
        taught, measured = play(bench, 0, 2 * args.episodes), play(bench, 1, args.episodes)
        mean = statistics.fmean(score(g) for g in taught)
        critic = Critic(bench.policy, CriticSection(value_clip=0.0), token_budget=8192, max_grad_norm=1.0)
        teach(critic, taught, args.epochs)
        optimizer = Keeping(bench.policy.trainable())

        def gradients(of: Any) -> Gradients:
            return Gradients([gradient(bench, optimizer, of([group])) for group in measured])

        plain = gradients(lambda groups: make_batch(groups, PLAIN))
        less_mean = gradients(lambda groups: make_batch(groups, PLAIN, CreditRules(baseline=mean)))
        judged = gradients(lambda groups: with_critic(critic, groups))
        knows = explained_variance(with_critic(critic, measured))
        right = statistics.fmean(g.trajectories[0].info.get("success", False) for g in measured)
    return " | ".join(
        [
            f"{right:.2f}",
            *(f"{g.variance():.3g}" for g in (plain, less_mean, judged)),
            ratio(less_mean, plain),
            ratio(judged, plain),
            f"{knows:.2f}",
        ]
    )


def play(bench: Workbench, part: int, episodes: int) -> list[Group]:
    """Groups of one episode each."""
    tasks = TaskSampler(bench.world, "train", mode="uniform", seed=part).next(episodes)
    played = rollout(
        bench.agents(1.0), bench.world, tasks, group_size=1, limits=bench.limits, seed=1000 + part
    )
    return bench.runner.run(played)


def score(group: Group) -> float:
    value = group.trajectories[0].score.value
    assert value is not None
    return value


def teach(critic: Critic, groups: list[Group], epochs: int) -> None:
    """Epochs over batches of 64, at a rate that falls to a tenth."""
    rng = random.Random(0)
    for epoch in range(epochs):
        rng.shuffle(groups)
        for start in range(0, len(groups), 64):
            rate = 1e-3 * 0.1 ** (epoch / epochs)
            critic.update(with_critic(critic, groups[start : start + 64]), rate=rate)


def with_critic(critic: Critic, groups: list[Group]) -> RlBatch:
    def judge(batch: RlBatch) -> MeasuredColumns:
        values, ends = critic.judge(batch)
        return MeasuredColumns(values=values, final_values=ends)

    return make_batch(groups, WITH_CRITIC, CreditRules(lam=1.0), measure=judge)


class Keeping(MasterOptimizer):
    """Keeps the gradient of a step instead of taking it."""

    def step(self, lr: float) -> float:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.masters.values()]
        self.seen = torch.cat([g.flatten() for g in grads]).detach()
        self.clear()
        return 0.0


def gradient(bench: Workbench, optimizer: Keeping, batch: RlBatch) -> torch.Tensor:
    """Of one episode; 0 where its advantage is 0 and no step is taken."""
    rules = UpdateRules(row=PLAIN, token_budget=8192)
    got = rl_update(bench.policy, optimizer, batch, rules, learning_rate=0.0)
    if not got["updated"]:
        return torch.zeros(sum(p.numel() for p in optimizer.masters.values()))
    return optimizer.seen


class Gradients:
    """Inner products of the gradients of n episodes: all that a variance, and its interval, needs."""

    def __init__(self, of: Sequence[torch.Tensor]) -> None:
        stacked = torch.stack(list(of))
        self.products = (stacked @ stacked.T).double()

    def variance(self, weights: torch.Tensor | None = None) -> float:
        """Σ over parameters of the variance over episodes; weights: how often each was drawn."""
        n = len(self.products)
        w = torch.ones(n, dtype=torch.float64) if weights is None else weights
        square, of_mean = w @ self.products.diagonal() / n, w @ self.products @ w / n**2
        return float(square - of_mean) * n / (n - 1)


def ratio(ours: Gradients, plain: Gradients, draws: int = 1000) -> str:
    """Ratio of the variances with a 95 % interval, from episodes drawn anew, the same for both."""
    n, generator = len(plain.products), torch.Generator().manual_seed(0)
    found = []
    for _ in range(draws):
        drawn = torch.randint(n, (n,), generator=generator)
        weights = torch.bincount(drawn, minlength=n).double()
        found.append(ours.variance(weights) / plain.variance(weights))
    found.sort()
    low, high = found[int(0.025 * draws)], found[int(0.975 * draws)]
    return f"{ours.variance() / plain.variance():.3f} ({low:.3f} to {high:.3f})"


HEAD = """\
# Gradient variance with and without a critic

Made by `python bench/variance.py`. The first of some turns decides, and what it earns is paid at the end. The
policy is fixed: it answers random digits, right one time in five. For each of the same 256 episodes three
gradients; variance is over episodes, summed over all parameters; ratios are to REINFORCE without a baseline,
with 95 % intervals (bootstrap over episodes). "explained" is the critic's explained variance on these
episodes, none of which it was trained on.

| pay | seed | right | no baseline | less the mean | critic | ratio, mean | ratio, critic | explained |
|---|---|---|---|---|---|---|---|---|"""
BETWEEN = """
Whole runs of PPO on 8 turns, paid 0 or 1 (the curves are in variance.svg): success of the first and the last
batch, the best explained variance (a moving mean of 5 steps, each measured before the critic has seen the
batch), and steps.

| seed | success, first | last | explained, best | steps |
|---|---|---|---|---|"""
END = """
## What to expect

With advantage A and score s = ∇ log π of a token, an episode's gradient has variance Σ E[A²]·E|s|² − |μ|²
(scores of different tokens are uncorrelated; here |s|² does not depend on the digit). One random digit a
turn, T turns, right with p = 1/5: E|s|² = 1 − 1/5 = 4/5 a turn, measured at the logits, and
|μ|² = p²·4/5·(spread of pay)² is the same for all.

| | T = 8, pay 0 or 1 | T = 1, pay 0 or 1 | T = 1, pay −1 or 4 |
|---|---|---|---|
| no baseline: E[R²] at every turn | 8·.2·.8 − .032 = 1.248 | .2·.8 − .032 = .128 | 4·.8 − .8 = 2.4 |
| less the mean: Var R at every turn | 8·.16·.8 − .032 = .992 | .16·.8 − .032 = .096 | 4·.8 − .8 = 2.4 |
| perfect critic: Var R at the first turn, 0 after it | .16·.8 − .032 = .096 | .096 | 2.4 |
| expected ratio, less the mean | .79 | .75 | 1 |
| expected ratio, critic | .077 | .75 | 1 |

A critic that explains less than all leaves the rest at the later turns. At an explained variance of .78
(1/16 of the tokens stand before the decision, so at most .94) about .17 of Var R is left there:
(.16·.8·(1 + 7·.17) − .032)/1.248 = .20.

So a critic can take away two things: the mean of the return, and what the state tells of it once something
has been decided. Where the return has mean 0 and nothing follows the decision (last column) there is
nothing to take: the ratio is 1 at best, and the critic's own error comes on top.
"""


if __name__ == "__main__":
    main()
