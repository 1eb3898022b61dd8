"""Where the time of decoding and of a training step goes: operators by their own time, beside the roofline.

    python bench/hot.py [--model FOLDER] [--rows 64] [--dtype bfloat16]

For the answer to "why is it under its bound". Needs no peer. Profiling takes time itself: read the shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from decode import make_prompts
from decode_sides import Ours, Work, load
from measuring import model_folder, parser, start
from torch.profiler import ProfilerActivity, profile

from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model
from stepladder.rungs.supervised import sft_update
from stepladder.types import TrainingSample

TOP = 12


def hottest(work: Callable[[], Any]) -> list[tuple[str, float, int]]:
    """(operator, share of all self time, calls) of every thread, the largest first."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine has its own
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as seen:
        work()
    found = [(e.key, e.self_cpu_time_total, e.count) for e in seen.key_averages()]
    total = sum(time for _, time, _ in found)
    ranked = sorted(found, key=lambda row: -row[1])[:TOP]
    return [(name, time / total, count) for name, time, count in ranked]


def decode(options: argparse.Namespace, tokenizer: Any) -> list[tuple[str, float, int]]:
    """Decoding, with the prompts' prefill."""
    side = Ours(load(model_folder(options.model), options.dtype))
    prompts = make_prompts(tokenizer, [64] * options.rows)
    side.run(Work(prompts, 2))
    found = hottest(lambda: side.run(Work(prompts, options.new)))
    side.close()
    return found


def train(options: argparse.Namespace, tokenizer: Any) -> list[tuple[str, float, int]]:
    """One SFT step, after one to warm up."""
    policy = Policy(*load_model(model_folder(options.model), dtype=options.dtype, device="cpu"))
    optimizer = MasterOptimizer(policy.trainable())
    samples = []
    for i, ids in enumerate(make_prompts(tokenizer, [options.length] * 4)):
        mask = tuple(t >= options.length // 2 for t in range(options.length))
        turns = tuple(int(m) - 1 for m in mask)
        samples.append(TrainingSample(tuple(ids), mask, (0.0,) * len(ids), str(i), turns, str(i)))

    def step() -> None:
        sft_update(policy, optimizer, samples, learning_rate=1e-6, token_budget=options.budget)

    step()
    return hottest(step)


def run(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    kept = start(options, "hot")
    tokenizer = AutoTokenizer.from_pretrained(model_folder(options.model))
    lines: list[str] = []
    titles = {
        f"Decoding {options.rows} sequences": decode,
        f"An SFT step of 4 × {options.length} tokens": train,
    }
    for title, measure in titles.items():
        rows = kept.once(title, lambda m=measure: m(options, tokenizer))
        lines += [f"## {title}", "", "| operator | share of self time | calls |", "|---|---|---|"]
        lines += [f"| {name} | {share:.1%} | {calls} |" for name, share, calls in rows]
        lines.append("")
    kept.page(f"Where the time goes, {options.dtype}", lines, [])


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--rows", type=int, default=64)
    made.add_argument("--new", type=int, default=16)
    made.add_argument("--length", type=int, default=256)
    made.add_argument("--budget", type=int, default=384)
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
