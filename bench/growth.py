"""How cost grows with the context, the group, an episode's turns and the batch; memory over 500 steps.

    python bench/growth.py [--model FOLDER] [--parts context group turns batch memory]

Every curve is total cost over size; its exponent is the slope of a line through the logarithms: 1 is linear.
Each point is the median of up to `--repeats` values, fewer where they take more than `--patience` seconds
together.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measuring import (
    Kept,
    Target,
    exponent,
    median_within,
    model_folder,
    parser,
    resident,
    start,
    steepest,
    timed,
)

PARTS = ("context", "group", "turns", "batch", "memory")
TITLES = {
    "context": ("Context", "tokens"),
    "group": ("Group, one prompt of {prompt} tokens", "completions"),
    "turns": ("Turns of an episode", "turns"),
    "batch": ("Batch", "sequences"),
}


class Bench:
    """One model for training and for the engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._policy: Any = None
        self._side: Any = None

    @property
    def policy(self) -> Any:
        if self._policy is None:
            from stepladder.policies.optimizer import MasterOptimizer
            from stepladder.policies.policy import Policy
            from stepladder.policies.pretrained import load_model

            model = load_model(model_folder(self.options.model), dtype="bfloat16", device="cpu")
            self._policy = Policy(*model)
            self.optimizer = MasterOptimizer(self._policy.trainable())
        return self._policy

    @property
    def side(self) -> Any:
        if self._side is None:
            from decode_sides import Ours

            self._side = Ours(self.policy.model, max_rows=max(self.options.batches))
        return self._side

    def median(self, measure: Callable[[], float]) -> float:
        return median_within(measure, self.options.repeats, self.options.patience)

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
        if self._policy is not None:
            self.optimizer.close()

    # -- work -----------------------------------------------------------------------------------------------

    def ids(self, count: int, seed: int) -> list[int]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.policy.lm.get_input_embeddings().weight.shape[0]
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    def gradients(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> None:
        """Forward and backward of one group; no step is taken."""
        from stepladder.rungs.supervised import sft_gradients
        from stepladder.types import TrainingSample

        samples = []
        for i, answer in enumerate(answers):
            mask = (False,) * len(prompt) + (True,) * len(answer)
            ids, turns = (*prompt, *answer), tuple(int(m) - 1 for m in mask)
            samples.append(TrainingSample(ids, mask, (0.0,) * len(ids), str(i), turns, "g"))
        sft_gradients(self.policy, samples, token_budget=self.options.budget)
        self.optimizer.clear()


def context(bench: Bench, length: int) -> dict[str, float]:
    """Forward and backward of one sequence, its peak above what was held, and a decoded token after it."""
    from decode_sides import Work

    from stepladder.planning.machine import PeakMeter
    from stepladder.policies.fast.heap import trim_heap

    o, whole = bench.options, bench.ids(length, length)
    bench.gradients(whole[:2], [whole[2:64]])
    trim_heap()
    meter, before = PeakMeter("cpu"), resident()
    meter.reset()
    bench.gradients(whole[:1], [whole[1:]])
    memory = meter.read() - before
    train = bench.median(lambda: timed(lambda: bench.gradients(whole[:1], [whole[1:]])))
    rows = [[*whole[: length - o.new - 1], 3 + i] for i in range(o.rows)]
    bench.side.run(Work(rows, 1))  # the prompts are in the prefix cache from here on
    more = bench.median(lambda: bench.side.run(Work(rows, 1 + o.new), keep=True)[0])
    none = bench.median(lambda: bench.side.run(Work(rows, 1), keep=True)[0])
    return {
        "train s": train,
        "train peak MB": memory / 1e6,
        "decode ms a token": longer(more, none) / o.new / o.rows * 1e3,
    }


def group(bench: Bench, size: int) -> dict[str, float]:
    """One prompt, `size` completions: playing them, and training on them."""
    from decode_sides import Work

    o = bench.options
    prompt = bench.ids(o.prompt, 1)
    answers = [bench.ids(o.new, 100 + i) for i in range(size)]
    work = Work([prompt], o.new, size)
    return {
        "rollout s": bench.median(lambda: bench.side.run(work)[0]),
        "train s": bench.median(lambda: timed(lambda: bench.gradients(prompt, answers))),
    }


def turns(bench: Bench, count: int) -> dict[str, float]:
    """Episodes whose history grows by what was sampled and by an observation, turn after turn."""
    import asyncio

    from stepladder.types import Sampling

    o, engine = bench.options, bench.side.engine
    prompts = [bench.ids(o.turn_tokens, 200 + i) for i in range(o.rows)]
    observation = bench.ids(o.turn_tokens, 300)
    read = 0

    async def episode(i: int) -> None:
        nonlocal read
        history = prompts[i]
        with engine.session(f"{i:04d}") as session:
            for turn in range(count):
                read += len(history)
                made = await session.generate(history, Sampling(1.0, o.turn_tokens, (), i * 100 + turn))
                history = [*history, *made.token_ids, *observation]

    async def all_of_them() -> None:
        await asyncio.gather(*(episode(i) for i in range(o.rows)))

    reused: list[float] = []

    def once() -> float:
        nonlocal read
        read = 0
        engine.drop_prefixes()
        engine.stats()
        seconds = timed(lambda: bench.side.runner.run(all_of_them()))
        reused.append(engine.stats().prefill_saved / read)
        return seconds

    return {"episode s": bench.median(once), "share of prompts reused": reused[-1]}


def batch(bench: Bench, size: int) -> dict[str, float]:
    """`size` sequences at once, a short prompt each; prefill is taken off."""
    from decode_sides import Work

    o = bench.options
    prompts = [[*bench.ids(4, 400), *bench.ids(4, 401 + i)] for i in range(size)]
    more = bench.median(lambda: bench.side.run(Work(prompts, 1 + o.steps))[0])
    none = bench.median(lambda: bench.side.run(Work(prompts, 1))[0])
    seconds = longer(more, none)
    return {"decode s": seconds, "tokens/s": size * o.steps / seconds}


def longer(more: float, none: float) -> float:
    """What the longer of two runs took more."""
    if more <= none:
        raise SystemExit(
            f"decoding more tokens took {more:.3f} s, fewer {none:.3f} s: something else computes on this "
            "machine. The same command goes on from here once it is quiet"
        )
    return more - none


def memory(options: argparse.Namespace) -> list[tuple[int, float]]:
    """(step, MB of its own memory) of a whole run with a tiny model, 20 times, watched from outside."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "stepladder", "train", "hidden_digit"]
        command += [f"run.out={scratch}", "run.name=flat", f"rl.steps={options.run_steps}"]
        command += ["rl.tasks_per_step=4", "rl.group_size=4", "rl.stop_at_success=null"]
        command += [f"run.checkpoint_every={max(1, options.run_steps // 5)}", "evaluation.tasks=8"]
        command += ["evaluation.raw=0", "rl.learning_rate=1e-5"]
        log = Path(scratch) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            seen = _watch(process, Path(scratch) / "flat" / "metrics.jsonl", options.run_steps)
            process.wait(120)
        finally:
            process.kill()
            process.wait()
        if len(seen) < 5:
            said = log.read_text(encoding="utf-8")[-3000:]
            raise SystemExit(f"the run of {options.run_steps} steps ended early:\n{said}")
    return seen


def _watch(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> list[tuple[int, float]]:
    every, seen = max(1, steps // 20), []
    while process.poll() is None and (not seen or seen[-1][0] < steps):
        time.sleep(0.05)
        try:
            done = metrics.read_text(encoding="utf-8").count('"phase": "rl"')
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        own = re.search(r"RssAnon:\s+(\d+) kB", status)  # without what it has mapped from files
        if own and done // every > (seen[-1][0] // every if seen else 0):
            seen.append((done, int(own[1]) * 1024 / 1e6))
    return seen


# -- all of it -----------------------------------------------------------------------------------------------


Measure = Callable[[Bench, int], dict[str, float]]


def sizes(options: argparse.Namespace) -> dict[str, tuple[Measure, list[int]]]:
    return {
        "context": (context, options.contexts),
        "group": (group, options.groups),
        "turns": (turns, options.turns),
        "batch": (batch, options.batches),
    }


def run(options: argparse.Namespace) -> list[Target]:
    from panels import panels

    kept = start(options, "growth", leave_out=("parts",))
    bench = Bench(options)
    lines: list[str] = []
    targets: list[Target] = []
    charts: dict[str, tuple[str, dict[str, list[tuple[float, float]]]]] = {}
    for part, (measure, points) in sizes(options).items():
        if part not in options.parts:
            continue
        found = {n: kept.once(f"{part}/{n}", lambda m=measure, n=n: m(bench, n)) for n in points}
        title, unit = TITLES[part][0].format(prompt=options.prompt), TITLES[part][1]
        curves = {
            name: [(float(n), found[n][name]) for n in points]
            for name in found[points[0]]
            if name not in ("tokens/s", "share of prompts reused")
        }
        charts[title] = (unit, curves)
        part_lines, more = part_table(title, unit, found, curves)
        lines += part_lines
        targets += more
    bench.close()
    if "memory" in options.parts:
        more_lines, target = memory_lines(kept, options)
        lines += more_lines
        targets.append(target)
    if charts:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "growth.svg").write_text(panels(charts), encoding="utf-8")
        lines.insert(0, "![total cost over size, logarithmic](growth.svg)\n")
    kept.page("How cost grows", lines, targets)
    return targets


def part_table(
    title: str,
    unit: str,
    found: dict[int, dict[str, float]],
    curves: dict[str, list[tuple[float, float]]],
) -> tuple[list[str], list[Target]]:
    names = list(next(iter(found.values())))
    lines = [f"## {title}", "", f"| {unit} | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [f"| {n} | {' | '.join(f'{values[k]:.3g}' for k in names)} |" for n, values in found.items()]
    slopes = {name: exponent(line) for name, line in curves.items()}
    shown = [f"{slopes[name]:.2f}" if name in slopes else "" for name in names]
    lines.append(f"| exponent | {' | '.join(shown)} |")
    shown = [f"{steepest(curves[name]):.2f}" if name in slopes else "" for name in names]
    lines += [f"| steepest between neighbours | {' | '.join(shown)} |", ""]
    targets = [
        Target(f"growth with {title.lower()}: exponent of {name}", slope, 1.2, below=True)
        for name, slope in slopes.items()
    ]
    return lines, targets


def memory_lines(kept: Kept, options: argparse.Namespace) -> tuple[list[str], Target]:
    seen = kept.once("memory", lambda: memory(options))
    half = [p for p in seen if p[0] > options.run_steps * 0.2]  # the first fifth fills caches
    mx = sum(s for s, _ in half) / len(half)
    my = sum(m for _, m in half) / len(half)
    slope = sum((s - mx) * (m - my) for s, m in half) / sum((s - mx) ** 2 for s, _ in half)
    lines = [
        f"## Memory over {options.run_steps} steps",
        "",
        "A whole run on a tiny model: rollout, update, sync, checkpoints, log. MB of its own memory at steps "
        + ", ".join(f"{step}: {mb:.0f}" for step, mb in seen[1::2])
        + f". Slope after the first fifth: {slope * 100:+.2f} MB in 100 steps.",
    ]
    return lines, Target("memory of a run, MB more in 100 steps", slope * 100, 1.0, below=True)


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--patience", type=float, default=10.0, help="seconds of one point's repeats")
    made.add_argument("--contexts", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    made.add_argument("--groups", nargs="+", type=int, default=[2, 4, 8, 16, 32, 64])
    made.add_argument("--turns", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    made.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512])
    made.add_argument("--prompt", type=int, default=256, help="tokens of the group's prompt")
    made.add_argument("--new", type=int, default=32, help="tokens of a completion")
    made.add_argument("--turn-tokens", type=int, default=16, help="of a turn, and of an observation")
    made.add_argument("--steps", type=int, default=8, help="tokens that the batch decodes")
    made.add_argument("--rows", type=int, default=4, help="sequences of the context and turns parts")
    made.add_argument("--budget", type=int, default=4096, help="token_budget of the training steps")
    made.add_argument("--run-steps", type=int, default=500, help="of the run whose memory is watched")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
