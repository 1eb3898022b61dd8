"""Peak memory of one update, PPO with four models down to LoRA: measured, beside what `plan` estimates.

    python bench/memory.py [--dtype float32] [--only grpo] [--out bench/results/memory.md]

What was measured is kept beside the table, as JSON; `--only` measures some cases again.

Each case is a process of its own on SmolLM2-135M: it loads the models, takes a first step on a few tokens
(which makes the optimiser's moments), and then one on two micro-batches of 512 tokens, whose peak resident
memory is read from the kernel. The engine and its caches are left out on both sides: nothing is played.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepladder.rungs.registry import needs_of

BUDGET, PROMPT, MODEL = 512, 32, "smollm2-135m-instruct"
DTYPES = ("float32", "bfloat16")
PLAYED = ("key/value cache", "engine's weights", "sampling")

# name -> (what it holds, the recipe's sections beside model and run)
RL = {"token_budget": BUDGET, "group_size": 4, "tasks_per_step": 2}
WORLD: dict[str, Any] = {
    "environment": {"name": "calculator"},
    "rollout": {"max_tokens": 120, "max_context": 152},
}
SCORED = {**WORLD, "environment": {"name": "calculator", "rewards": ["reward_model:not-there"]}}
PPO = {**RL, "algorithm": "ppo", "kl": {"coefficient": 0.05, "place": "reward"}}
FIT = {"data": "rows.jsonl", "token_budget": BUDGET, "validation": 0}
LIMITS = {"max_prompt_tokens": 32, "max_completion_tokens": 112}
LORA = {"model": {"lora": {"rank": 16}}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("policy, reference, critic with its own trunk, reward model", {**SCORED, "rl": PPO}),
    "ppo shared": (
        "policy and critic on one trunk, reference, reward model",
        {**SCORED, "rl": {**PPO, "critic": {"trunk": "shared"}}},
    ),
    "grpo with kl": (
        "policy, reference",
        {**WORLD, "rl": {**RL, "algorithm": "grpo", "kl": {"coefficient": 0.04}}},
    ),
    "grpo": ("policy", {**WORLD, "rl": {**RL, "algorithm": "grpo", "kl": {"coefficient": 0.0}}}),
    "reward model": (
        "policy, and a copy of it with a head, which is trained",
        {"reward_model": {**FIT, **LIMITS}},
    ),
    "dpo": (
        "policy (its reference was logged before)",
        {"preference": {**FIT, "limits": LIMITS}},
    ),
    "sft": ("policy", {"sft": {**FIT, "max_tokens": 128}}),
    "sft, embeddings frozen": (
        "policy",
        {"model": {"train_embeddings": False}, "sft": {**FIT, "max_tokens": 128}},
    ),
    "dpo lora": (
        "policy with an adapter",
        {**LORA, "preference": {**FIT, "limits": LIMITS}},
    ),
    "sft lora": ("policy with an adapter", {**LORA, "sft": {**FIT, "max_tokens": 128}}),
}


def recipe_of(case: str, dtype: str) -> Any:
    from stepladder.recipe.config import parse_recipe

    sections = dict(CASES[case][1])
    model = {"name": MODEL, "dtype": dtype, "device": "cpu", **sections.pop("model", {})}
    return parse_recipe({"run": {"threads": 1}, "model": model, **sections})


def estimated(case: str, dtype: str) -> Any:
    """The rung's plan without what plays."""
    from dataclasses import replace

    from stepladder.planning.plan import plan_recipe

    recipe = recipe_of(case, dtype)
    (rung,) = plan_recipe(recipe, needs_of(recipe), device="cpu", dtype=dtype).rungs
    return replace(rung, parts=tuple(p for p in rung.parts if p.name not in PLAYED))


# -- one case, in its own process ---------------------------------------------------------------------------


def samples_of(groups: int, siblings: int, length: int, *, short: bool = False) -> list[Any]:
    """`groups` prompts of 32 tokens with `siblings` answers each, `length` tokens in all."""
    from stepladder.types import TrainingSample

    out, answer = [], 4 if short else length - PROMPT
    for g in range(groups):
        prompt = [(g * 131 + 7 * j) % 40_000 + 100 for j in range(PROMPT)]
        for i in range(siblings):
            ids = prompt + [(g * 977 + i * 389 + 11 * j + 5) % 40_000 + 100 for j in range(answer)]
            mask = tuple(j >= PROMPT for j in range(len(ids)))
            turns = tuple(0 if m else -1 for m in mask)
            name = f"{g}/{i}" if siblings != 2 else str(g)
            out.append(TrainingSample(tuple(ids), mask, (-1.0,) * len(ids), name, turns, str(g)))
    return out


def update_of(case: str, recipe: Any, policy: Any, hold: list[Any]) -> Callable[[bool], None]:
    """The models of the case, and its update on few or many tokens."""
    from stepladder.policies.optimizer import MasterOptimizer

    if recipe.rl is not None:
        return rl_case(recipe, policy, hold)
    if recipe.reward_model is not None:
        from stepladder.policies.heads import ScoredModel
        from stepladder.rungs.reward_model.ranking_update import Ranked, ranking_update

        model = ScoredModel.own_trunk(policy)
        optimizer = MasterOptimizer(model.trainable())

        def score(short: bool) -> None:
            s = samples_of(4, 2, 144, short=short)
            rows = [Ranked((a, b), (0,), (1,), (0.0,)) for a, b in zip(s[::2], s[1::2], strict=True)]
            ranking_update(model, optimizer, rows, centring=0.01, learning_rate=1e-6, token_budget=BUDGET)

        return score
    optimizer = MasterOptimizer(policy.trainable())
    if recipe.preference is not None:
        import torch

        from stepladder.rungs.preference.update import Answer, Pair, pair_loss, preference_update

        loss = pair_loss(recipe.preference)

        def prefer(short: bool) -> None:
            s = [Answer(x, torch.full((x.num_trained,), -2.0)) for x in samples_of(4, 2, 144, short=short)]
            pairs = [Pair(a, b) for a, b in zip(s[::2], s[1::2], strict=True)]
            preference_update(policy, optimizer, pairs, loss, learning_rate=1e-6, token_budget=BUDGET)

        return prefer
    from stepladder.rungs.supervised import sft_update

    def fit(short: bool) -> None:
        rows = samples_of(8, 1, 128, short=short)
        sft_update(policy, optimizer, rows, learning_rate=1e-6, token_budget=BUDGET)

    return fit


def rl_case(recipe: Any, policy: Any, hold: list[Any]) -> Callable[[bool], None]:
    import torch

    from stepladder.policies.heads import ScoredModel
    from stepladder.policies.optimizer import MasterOptimizer
    from stepladder.policies.policy import Policy
    from stepladder.recipe.rl_credit import CriticSection
    from stepladder.rungs.rl.critic import Critic
    from stepladder.rungs.rl.update import RlBatch, UpdateRules, reference_kl, rl_update

    settings = recipe.rl
    row, critic, reference = settings.row(), None, None
    if recipe.environment.rewards:
        hold.append(ScoredModel.own_trunk(policy))
        hold[-1].requires_grad_(False)
    if row.kl_in != "none":
        model = copy.deepcopy(policy.model)
        model.requires_grad_(False)
        reference = Policy(model, policy.tokenizer, mode=policy.mode)
    if row.needs_critic:
        critic = Critic(policy, settings.critic or CriticSection(), token_budget=BUDGET, max_grad_norm=1.0)
    optimizer = MasterOptimizer(critic.model.trainable() if critic and critic.shared else policy.trainable())
    rules = UpdateRules(row=row, token_budget=BUDGET, constant=120.0)

    def update(short: bool) -> None:
        samples = samples_of(2, 4, 152, short=short)
        n, width = len(samples), len(samples[0].token_ids)
        group = torch.tensor([int(s.group_id) for s in samples])
        batch = RlBatch(samples, torch.linspace(-1, 1, n), torch.arange(n), group)
        if row.kl_in == "reward" and reference is not None:
            reference_kl(batch, reference, temperature=1.0, token_budget=BUDGET)
        for scorer in hold:
            with torch.no_grad():
                scorer.sequence_scores(samples[:4])
        if critic is not None:
            batch.values, batch.returns = torch.zeros(n, width), torch.ones(n, width)
            critic.judge(batch)
        also = critic.loss(batch, coefficient=0.1) if critic and critic.shared else None
        kept = reference if row.kl_in == "loss" else None
        rl_update(policy, optimizer, batch, rules, learning_rate=1e-6, reference=kept, also=also)
        if critic is not None and not critic.shared:
            critic.update(batch, rate=1e-6)

    return update


def measure(case: str, dtype: str) -> float:
    """Bytes of this process at the peak of the second update."""
    import torch

    from stepladder.planning.machine import PeakMeter
    from stepladder.workbench.prepare import _with_lora, build_policy

    torch.set_num_threads(1)
    recipe = recipe_of(case, dtype)
    policy = build_policy(recipe)
    if recipe.model.lora is not None:
        policy = _with_lora(policy, recipe)
    elif not recipe.model.train_embeddings:
        policy.freeze_embeddings()
    hold: list[Any] = []
    update = update_of(case, recipe, policy, hold)
    update(True)
    meter = PeakMeter("cpu")
    meter.reset()
    update(False)
    return meter.read()


def in_a_process(case: str, dtype: str) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


# -- the table ----------------------------------------------------------------------------------------------


def table(measured: dict[str, dict[str, float]], commit: str) -> str:
    """By type, then by case; estimates are made anew, so that they are those of the present code."""
    import torch

    lines = [
        "# Memory of an update",
        "",
        f"{MODEL}, one update of two micro-batches of {BUDGET} tokens, each case in a process of its own "
        f"(one thread, torch {torch.__version__}, {platform.system()} {platform.machine()}). Measured: peak "
        "resident memory of the whole process in GB (10⁹ bytes), Python and libraries included, in its "
        "second update. Estimated: what `stepladder plan` says of the same recipe before anything is loaded. "
        "The engine and its caches are left out on both sides. Made by `python bench/memory.py`, last at "
        f"commit {commit}.",
        "",
    ]
    for dtype, found in measured.items():
        lines += [
            f"## {dtype}",
            "",
            "| update | models in memory | measured | estimated | error |",
            "|---|---|---:|---:|---:|",
        ]
        for case in (case for case in CASES if case in found):
            real, guess = found[case] / 1e9, estimated(case, dtype).peak / 1e9
            lines.append(
                f"| {case} | {CASES[case][0]} | {real:.2f} | {guess:.2f} | {guess / real - 1:+.0%} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--only", action="append", choices=CASES, help="these cases; the others stay")
    parser.add_argument("--case", help="(one case, in this process)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.md")
    asked = parser.parse_args()
    if asked.case:
        print(measure(asked.case, asked.dtype[0]))
        return
    kept = asked.out.with_suffix(".json")
    measured = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    measured.pop("commit", None)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    for dtype in asked.dtype or DTYPES:
        for case in asked.only or CASES:
            measured.setdefault(dtype, {})[case] = found = in_a_process(case, dtype)
            print(f"{case}, {dtype}: {found / 1e9:.2f} GB", flush=True)
            said = json.dumps({"commit": commit, **measured}, indent=2)
            kept.write_text(said + "\n", encoding="utf-8")
            asked.out.write_text(table(measured, commit), encoding="utf-8")


if __name__ == "__main__":
    main()
