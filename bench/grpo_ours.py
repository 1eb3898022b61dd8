"""stepladder's side of grpo.py: the engine plays, the rewards become a batch, one update, one sync."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import torch
from grpo_common import RATE, Meter, Step, options, read, report, reward
from resident import peak

from stepladder.algorithms import ALGORITHMS
from stepladder.engines.local.engine import LocalEngine
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model
from stepladder.rungs.rl.credit import make_batch
from stepladder.rungs.rl.update import UpdateRules, rl_update
from stepladder.rungs.rl.watch.canary import Canary
from stepladder.types import Generation, Group, Message, Sampling, Score, Task, TrainingSample, Trajectory

# trl's default loss: group advantages over their deviation, clip at .2, the mean over all tokens, no KL
ROW = dataclasses.replace(
    ALGORITHMS["dapo"], clip_high=0.2, dynamic_sampling=False, overlong_penalty=0.0, kl_in="none"
)


class Run:
    """`exact`: all in float32, on given completions, without an engine."""

    def __init__(self, policy: Policy, *, group: int, new: int, exact: bool) -> None:
        self.policy, self.group, self.new = policy, group, new
        self.optimizer = MasterOptimizer(policy.trainable())
        self.rules = UpdateRules(row=ROW, correction="none" if exact else "token_cap")
        self.engine = None if exact else LocalEngine(policy.model, dtype="auto")
        self.canary = None if self.engine is None else Canary(policy, self.engine)
        self.runner = asyncio.Runner()
        self.version = 0

    def step(self, step: Step) -> dict[str, float]:
        prompts = [self.policy.tokenizer(text).input_ids for text in step.texts]
        expanded = [ids for ids in prompts for _ in range(self.group)]
        if self.engine is None:
            made = [_as_generation(ids) for ids in step.completions]
        else:
            made = self.runner.run(self._play(expanded, self.engine))
            self.engine.rest()
        batch = make_batch(self._groups(prompts, made), ROW)
        together = max(map(len, prompts)) + self.group * self.new  # tokens of a group
        rules = dataclasses.replace(self.rules, token_budget=together)
        metrics = rl_update(self.policy, self.optimizer, batch, rules, learning_rate=RATE)
        if self.engine is not None and self.canary is not None:
            self.version += 1
            self.engine.sync(self.version)
            self.canary.check(self.version)
        return metrics

    async def _play(self, prompts: Sequence[Sequence[int]], engine: LocalEngine) -> list[Generation]:
        async def one(ids: Sequence[int], seed: int) -> Generation:
            with engine.session(f"{seed:06d}") as session:
                return await session.generate(ids, Sampling(1.0, self.new, (), seed))

        first = self.version * len(prompts)
        return await asyncio.gather(*(one(ids, first + i) for i, ids in enumerate(prompts)))

    def _groups(self, prompts: Sequence[Sequence[int]], made: Sequence[Generation]) -> list[Group]:
        groups = []
        for g, prompt in enumerate(prompts):
            task = Task(str(g), "train", "bench", (Message("user", ""),))
            members = made[g * self.group : (g + 1) * self.group]
            played = [_trajectory(task, prompt, m, f"{g}/{i}") for i, m in enumerate(members)]
            groups.append(Group(str(g), task, tuple(played)))
        return groups

    def close(self) -> None:
        if self.engine is not None:
            self.runner.run(self.engine.close())
        self.runner.close()


def _as_generation(ids: Sequence[int]) -> Generation:
    return Generation(tuple(ids), (0.0,) * len(ids), ((0, len(ids)),), "length")


def _trajectory(task: Task, prompt: Sequence[int], made: Generation, key: str) -> Trajectory:
    ids = (*prompt, *made.token_ids)
    before = len(prompt)
    sample = TrainingSample(
        ids,
        (False,) * before + (True,) * len(made.token_ids),
        (0.0,) * before + made.logprobs,
        key,
        (-1,) * before + (0,) * len(made.token_ids),
        task.id,
    )
    score = Score(reward(made.token_ids))
    return Trajectory(key, task.id, task, (), (), (score.value,), score, "terminated", samples=(sample,))


def main() -> None:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    steps = read(args.data)
    imports = peak()
    exact = args.mode == "agree"
    policy = Policy(*load_model(args.model, dtype="float32" if exact else "bfloat16", device="cpu"))
    run = Run(policy, group=args.group, new=args.new, exact=exact)
    meter, metrics = Meter(), []
    for step in steps:
        meter.begin()
        metrics.append(run.step(step))
        meter.end()
    count = sum(p.numel() for p in policy.trainable().values())
    # masters, two moments and gradients in float32; in bf16 the weights that compute besides
    state = float(count * (16 if exact else 18))
    if run.engine is not None:  # its copy: every weight, the head packed for itself
        head = policy.lm.get_output_embeddings().weight.numel()
        state += (count + head) * run.engine.dtype.itemsize
    run.close()
    report(
        args,
        meter,
        imports,
        state,
        losses=[m["loss"] for m in metrics],
        norms=[m["grad_norm"] for m in metrics],
        log_ratio_abs=[m["log_ratio_abs"] for m in metrics],
    )


if __name__ == "__main__":
    main()
