"""Tokens per second of the in-process engine beside transformers' `generate`, in one interleaved run.

    python bench/rollout.py MODEL_FOLDER [--dtype float32 bfloat16] [--out bench/results/rollout.md]

Both get the same prompts, sample at temperature 1 and make exactly `--new` tokens a sequence, prefill
included in the time. The engine returns log-probabilities and transformers does not. Greedy ids are compared
first. Numbers are medians of interleaved repeats; read the ratio, not the absolutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stepladder.engines.local import LocalEngine
from stepladder.types import Generation, Sampling

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jill", "Kai", "Lena", "Max"]
THINGS = ["apples", "books", "coins", "drums", "eggs", "ferns", "gates", "hats", "inks", "jars", "kites"]


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Distinct texts of 40 to 80 tokens that share no beginning beyond a word."""
    draw = random.Random(0)
    prompts = []
    for i in range(count):
        text = f"{draw.choice(NAMES)} number {i}"
        length = draw.randint(40, 80)
        while len(ids := tokenizer(text, add_special_tokens=False).input_ids) < length:
            text += (
                f" has {draw.randint(10, 999)} {draw.choice(THINGS)} and gives {draw.randint(2, 9)} to "
                f"{draw.choice(NAMES)}, who"
            )
        prompts.append(ids[:length])
    return prompts


def run_transformers(
    model: Any, prompts: Sequence[list[int]], new: int, group: int, greedy: bool
) -> torch.Tensor:
    """Left-padded `generate`: [sequences, new]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,
        max_new_tokens=new,
        num_return_sequences=group,
        eos_token_id=None,
        pad_token_id=0,
    )
    return model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]


async def run_engine(
    engine: LocalEngine, prompts: Sequence[list[int]], new: int, group: int, temperature: float
) -> list[Generation]:
    """One session a sequence, as a rollout does."""

    async def one(ids: list[int], seed: int) -> Generation:
        with engine.session(str(seed)) as session:
            return await session.generate(ids, Sampling(temperature, new, (), seed))

    expanded = [ids for ids in prompts for _ in range(group)]
    return await asyncio.gather(*(one(ids, seed) for seed, ids in enumerate(expanded)))


def agreement(model: Any, engine: LocalEngine, prompts: Sequence[list[int]]) -> float:
    """Share of equal greedy tokens over 16 new ones (bf16 rounds differently, fp32 must give 1)."""
    own = run_transformers(model, prompts, 16, 1, greedy=True).tolist()
    ours = [list(out.token_ids) for out in asyncio.run(run_engine(engine, prompts, 16, 1, 0.0))]
    pairs = [(a, b) for x, y in zip(own, ours, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def compare(
    model: Any, engine: LocalEngine, prompts: Sequence[list[int]], new: int, group: int, repeats: int
) -> tuple[float, float, float]:
    """Medians of tokens/s of transformers and of the engine, and generated tokens per row computed."""
    total = len(prompts) * group * new
    times: tuple[list[float], list[float]] = ([], [])
    sharing = 1.0
    for _ in range(repeats):
        start = time.perf_counter()
        run_transformers(model, prompts, new, group, greedy=False)
        times[0].append(time.perf_counter() - start)
        engine.drop_prefixes()
        engine.stats()
        start = time.perf_counter()
        asyncio.run(run_engine(engine, prompts, new, group, 1.0))
        times[1].append(time.perf_counter() - start)
        stats = engine.stats()
        sharing = (stats.generated - len(prompts) * group) / max(1, stats.row_steps)  # decode only
    return total / statistics.median(times[0]), total / statistics.median(times[1]), sharing


def describe() -> str:
    """The machine, without its name."""
    cpu = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU"
    )
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "")
    extra = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    load = os.getloadavg()[0]
    return (
        f"{cpu or platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores "
        f"{' '.join(extra)}; torch {torch.__version__}, transformers {transformers.__version__}; "
        f"load average at the start {load:.1f}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def bench(folder: str, dtype: str, sizes: Sequence[int], new: int, repeats: int) -> list[str]:
    """Rows of the table for one type."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    model.generation_config = GenerationConfig()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = make_prompts(tokenizer, max(sizes))
    engine = LocalEngine(model)
    equal = agreement(model, engine, prompts[:8])
    print(f"{dtype}: {engine.path} path, greedy agreement {equal:.3f}", flush=True)
    rows = []
    for size in sizes:
        for group in (1, 8):
            if group > size:
                continue
            own, ours, sharing = compare(model, engine, prompts[: size // group], new, group, repeats)
            kind = "distinct" if group == 1 else f"groups of {group}"
            row = f"| {dtype} | {size} | {kind} | {own:.0f} | {ours:.0f} | {ours / own:.2f} | {sharing:.2f} |"
            print(row, flush=True)
            rows.append(row)
    asyncio.run(engine.close())
    return [*rows, f"| {dtype} | | greedy ids equal | | {equal:.1%} | | |"]


def main() -> None:
    """Run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a causal LM and its tokenizer")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--note", default="", help="a sentence about the machine's other work")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    machine = describe()
    print(machine, flush=True)
    rows: list[str] = []
    for dtype in args.dtype:
        rows += bench(args.model, dtype, args.sizes, args.new, args.repeats)
        if args.out:  # after each type: a run that is cut short leaves what it has
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(report(f"{machine}. {args.note}", args.new, args.repeats, rows))


def report(machine: str, new: int, repeats: int, rows: Sequence[str]) -> str:
    """The page of results."""
    return "\n".join(
        [
            "# Rollout speed: the in-process engine beside transformers' `generate`",
            "",
            machine,
            "",
            f"Prompts of 40 to 80 tokens, {new} new tokens each at temperature 1, prefill included; "
            f"medians of {repeats} interleaved repeats; the prefix cache is dropped before each. Sharing: "
            "tokens decoded per row computed.",
            "",
            "| type | sequences | prompts | transformers tokens/s | engine tokens/s | ratio | sharing |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
