"""Tokens a second of the in-process engine beside transformers and vLLM, prefill included, interleaved.

    python bench/decode.py [--vllm PYTHON] [--model FOLDER] [--parts greedy speed ragged roofline]

Every side gets the same token ids, samples at temperature 1 and makes exactly `--new` tokens a sequence.
The engine gives log-probabilities, the others do not. Of transformers, `generate` in both types and its
continuous batching are tried, and the best counts; a mode that reaches under 80 % of it is run once only.
Nothing is kept between repeats: prefix caches are emptied. Read the ratios; absolutes depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from measuring import Kept, Target, model_folder, parser, peer, start

PARTS = ("greedy", "speed", "ragged", "roofline")
GROUP = 8
MODES = ("transformers bfloat16", "transformers float32", "transformers continuous")
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jill", "Kai", "Lena", "Max"]
THINGS = ["apples", "books", "coins", "drums", "eggs", "ferns", "gates", "hats", "inks", "jars", "kites"]


def make_prompts(tokenizer: Any, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Distinct texts of those lengths in tokens that share no beginning beyond a word."""
    draw = random.Random(seed)
    prompts = []
    for i, length in enumerate(lengths):
        text = f"{draw.choice(NAMES)} number {i}"
        while len(ids := tokenizer(text, add_special_tokens=False).input_ids) < length:
            text += (
                f" has {draw.randint(10, 999)} {draw.choice(THINGS)} and gives {draw.randint(2, 9)} to "
                f"{draw.choice(NAMES)}, who"
            )
        prompts.append(ids[:length])
    return prompts


def ragged_lengths(count: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Log-uniform: as many from 4 to 8 as from 128 to 256, in random order, both ends among them."""
    draw = random.Random(seed)
    made = [round(low * (high / low) ** draw.random()) for _ in range(count - 2)] + [low, high]
    draw.shuffle(made)
    return made


def even_lengths(lengths: Sequence[int]) -> list[int]:
    """As many, of the same total, that differ by one at most."""
    whole, rest = divmod(sum(lengths), len(lengths))
    return [whole + (i < rest) for i in range(len(lengths))]


class Bench:
    """The sides, each loaded when it is first asked for."""

    def __init__(self, options: argparse.Namespace, kept: Kept) -> None:
        self.options, self.kept = options, kept
        self.folder = model_folder(options.model)
        self._made: dict[str, Any] = {}
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def side(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        from decode_sides import ContinuousBatching, Ours, Transformers, Vllm, load

        kind, _, dtype = name.partition(" ")
        if kind == "vllm":
            rows = max(self.options.sizes)
            return Vllm(self.options.vllm, self.folder, self.options.dtype, rows, self.options.vllm_options)
        if kind == "ours":
            rows = {"max_rows": self.options.rows} if dtype == "ragged" else {}
            dtype = dtype if dtype == "float32" else self.options.dtype
            return Ours(load(self.folder, dtype), dtype=dtype, **rows)
        if dtype == "continuous":
            return ContinuousBatching(load(self.folder, "bfloat16"))
        return Transformers(load(self.folder, dtype))

    def close(self, *names: str) -> None:
        """These sides, or all."""
        for name in names or list(self._made):
            if name in self._made:
                self._made.pop(name).close()


# -- equal ids first -----------------------------------------------------------------------------------------


def greedy(bench: Bench) -> dict[str, float]:
    """Shares of greedy ids equal to those of transformers in float32."""
    from decode_sides import Work

    work = Work(make_prompts(bench.tokenizer, [40 + 5 * i for i in range(8)]), 16, greedy=True)
    names = ["ours float32", f"ours {bench.options.dtype}", f"transformers {bench.options.dtype}"]
    names += ["vllm"] if bench.options.vllm else []
    wanted = bench.side("transformers float32").run(work)[1]
    shares = {}
    for name in dict.fromkeys(names):
        got = bench.side(name).run(work)[1]
        equal = [a == b for x, y in zip(got, wanted, strict=True) for a, b in zip(x, y, strict=True)]
        shares[name] = sum(equal) / len(equal)
    bench.close("ours float32")
    return shares


# -- speed ---------------------------------------------------------------------------------------------------


def speed(bench: Bench, size: int, group: int) -> dict[str, Any]:
    """Seconds of every side, interleaved; how many tokens were decoded for each row that ours computed.

    To transformers a group is work like any other, so there one run of `generate` is enough.
    """
    from decode_sides import Work

    draw = random.Random(size)
    prompts = make_prompts(bench.tokenizer, [draw.randint(40, 80) for _ in range(size // group)], size)
    work = Work(prompts, bench.options.new, group)
    modes = MODES if group == 1 else MODES[:1]
    sides = ["ours", *(m for m in modes if m not in bench.options.without)]
    sides += ["vllm"] if bench.options.vllm else []
    short = Work(prompts[:1], 2)
    for name in sides:
        bench.side(name).run(short)  # loaded and warm
    found: dict[str, list[float]] = {name: [bench.side(name).run(work)[0]] for name in sides}
    best = min(seconds[0] for name, seconds in found.items() if name in MODES)
    keep = MODES if group == 1 else ()
    sides = [n for n in sides if n not in MODES or (n in keep and found[n][0] * 0.8 <= best)]
    for _ in range(bench.options.repeats - 1):
        for name in sides:
            found[name].append(bench.side(name).run(work)[0])
    return {"tokens": work.tokens, "seconds": found, "sharing": bench.side("ours").sharing}


def rates(row: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of each side, from medians."""
    return {name: row["tokens"] / statistics.median(s) for name, s in row["seconds"].items()}


def speed_lines(rows: dict[tuple[int, int], dict[str, Any]], vllm: bool) -> tuple[list[str], list[Target]]:
    lines = [
        "| sequences | prompts | ours | transformers bf16 | fp32 | continuous | vllm "
        "| ours / best of transformers | ours / vllm | tokens a row |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    targets = []
    for (size, group), row in rows.items():
        rate = rates(row)
        best = max(rate[m] for m in MODES if m in rate)
        shown = [f"{rate[m]:.0f}" if m in rate else "-" for m in ("ours", *MODES, "vllm")]
        against = rate["ours"] / rate["vllm"] if "vllm" in rate else None
        kind = "distinct" if group == 1 else f"groups of {group}"
        lines.append(
            f"| {size} | {kind} | {' | '.join(shown)} | {rate['ours'] / best:.2f} "
            f"| {'-' if against is None else f'{against:.2f}'} | {row['sharing']:.2f} |"
        )
        why = "" if vllm else "vllm was not given"
        if group == 1:
            bars = (2.0, 2.5) if size == 64 else (1.0, None)
            targets.append(Target(f"decode {size}, transformers' best", rate["ours"] / best, *bars))
            targets.append(Target(f"decode {size}, vllm", against, 1.0, why=why))
        elif size == 64:
            targets.append(Target(f"decode {size} in groups of {group}, vllm", against, 1.3, 1.5, why=why))
    return lines, targets


# -- ragged lengths ------------------------------------------------------------------------------------------


def ragged(bench: Bench, what: str) -> dict[str, list[float]]:
    """Seconds of even and of ragged lengths, the same number of tokens in all."""
    from decode_sides import Work

    o = bench.options
    if what == "prompts":
        lengths = ragged_lengths(o.rows, o.shortest, o.longest)
        even, uneven = (
            Work(make_prompts(bench.tokenizer, n), o.new) for n in (even_lengths(lengths), lengths)
        )
    else:
        lengths = ragged_lengths(o.requests, o.shortest, o.longest)
        prompts = make_prompts(bench.tokenizer, [16] * o.requests)
        even, uneven = (Work(prompts, 0, lengths=n) for n in (even_lengths(lengths), lengths))
    side = bench.side("ours ragged")
    side.run(Work(even.prompts[:4], 4))
    seconds: dict[str, list[float]] = {"even": [], "ragged": []}
    for _ in range(o.repeats):
        seconds["even"].append(side.run(even)[0])
        seconds["ragged"].append(side.run(uneven)[0])
    return seconds


# -- the roofline --------------------------------------------------------------------------------------------


def roofline(bench: Bench, size: int) -> dict[str, float]:
    """Shares of the bound for prefill and for a steady decode step, and what they were computed from."""
    import torch
    from roofline import Cost, Roof, measure_roof

    o = bench.options
    dtype = getattr(torch, o.dtype)
    roof = Roof(**bench.kept.once("roof", lambda: asdict(measure_roof("cpu", dtype, side=o.side))))
    side = bench.side("ours")
    cost = Cost.of(side.model, dtype)
    length, steps = 64, o.new
    prompts = make_prompts(bench.tokenizer, [length] * size, seed=1)
    both = [side.prefill_and_steps(prompts, steps) for _ in range(o.repeats)]
    prefill = statistics.median(first for first, _ in both)
    step = statistics.median(rest for _, rest in both) / steps
    bound = roof.seconds(*cost.decode_step(size, length + steps / 2))
    return {
        "decode": bound / step,
        "prefill": roof.seconds(*cost.prefill(size, length)) / prefill,
        "step_ms": step * 1e3,
        "bound_ms": bound * 1e3,
        "prefill_s": prefill,
        "bandwidth": roof.bandwidth,
        "peak": roof.peak,
    }


# -- all of it -----------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> list[Target]:
    """Measure what is not there yet; write the page."""
    kept = start(options, "decode", leave_out=("parts",))
    bench = Bench(options, kept)
    lines: list[str] = []
    targets: list[Target] = []
    if "greedy" in options.parts:
        shares = kept.once("greedy", lambda: greedy(bench))
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        lines += [f"Greedy ids equal to those of transformers in float32: {listed}.", ""]
        targets.append(Target("greedy ids equal to transformers', float32", shares["ours float32"], 1.0))
    if "speed" in options.parts:
        shapes = [(n, g) for g in (1, GROUP) for n in options.sizes if n >= g]
        rows = {(n, g): kept.once(f"speed/{n}/{g}", lambda n=n, g=g: speed(bench, n, g)) for n, g in shapes}
        table, found = speed_lines(rows, bool(options.vllm))
        lines += [
            f"Tokens a second, ours and vllm in {options.dtype}; prompts of 40 to 80 tokens, {options.new} "
            f"new ones each, prefill included, medians of {options.repeats}. Tokens a row: decoded tokens "
            "for each row computed (siblings that are still equal share one). vllm with prefix caching and "
            f"{json.dumps({'enforce_eager': True} | options.vllm_options)}.",
            "",
            *table,
            "",
        ]
        targets += found
    bench.close(*MODES, "vllm")
    if "roofline" in options.parts:
        parts = {n: kept.once(f"roofline/{n}", lambda n=n: roofline(bench, n)) for n in options.sizes}
        lines += [*roofline_lines(parts, options.dtype), ""]
        for n, share in parts.items():
            targets.append(Target(f"decode {n}, share of the roofline", share["decode"], None, 0.6))
        largest = parts[max(parts)]["prefill"]
        targets.append(Target("prefill, share of the roofline", largest, None, 0.6))
    bench.close("ours")
    if "ragged" in options.parts:
        for what in ("prompts", "completions"):
            seconds = kept.once(f"ragged/{what}", lambda w=what: ragged(bench, w))
            share = statistics.median(seconds["even"]) / statistics.median(seconds["ragged"])
            name = f"ragged {what} ({options.shortest} to {options.longest}), share of even speed"
            targets.append(Target(name, share, 0.8))
        lines.append(
            f"Ragged lengths are log-uniform: prompts {options.rows} at once; completions of "
            f"{options.requests} requests through {options.rows} rows."
        )
    bench.close()
    kept.page("Decoding: the in-process engine beside transformers and vLLM", lines, targets)
    return targets


def roofline_lines(parts: dict[int, dict[str, float]], dtype: str) -> list[str]:
    first = next(iter(parts.values()))
    lines = [
        f"The bound of a step is the longer of reading weights and cache at {first['bandwidth'] / 1e9:.1f} "
        f"GB/s and of computing at {first['peak'] / 1e9:.0f} GFLOP/s ({dtype}), both measured here.",
        "",
        "| sequences | ms a step | bound | share | prefill s | share |",
        "|---|---|---|---|---|---|",
    ]
    for n, p in parts.items():
        lines.append(
            f"| {n} | {p['step_ms']:.1f} | {p['bound_ms']:.1f} | {p['decode']:.2f} | {p['prefill_s']:.2f} "
            f"| {p['prefill']:.2f} |"
        )
    return lines


def options_parser() -> argparse.ArgumentParser:

    made = parser(__doc__)
    peer(made, "vllm")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 32, 64])
    made.add_argument("--new", type=int, default=32)
    made.add_argument("--without", nargs="*", choices=MODES, default=[], help="modes of transformers")
    made.add_argument(
        "--vllm-options", type=json.loads, default={}, help='{"enforce_eager": false} has it compile'
    )
    made.add_argument("--rows", type=int, default=64, help="of the ragged part")
    made.add_argument("--requests", type=int, default=256, help="of the ragged completions")
    made.add_argument("--shortest", type=int, default=4)
    made.add_argument("--longest", type=int, default=256)
    made.add_argument("--side", type=int, default=0, help="of the matrices of the roofline")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
