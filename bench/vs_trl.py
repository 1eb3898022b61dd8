"""SFT, DPO, KTO and a reward model beside trl 1.16: same file, model, batches and steps.

bench/make_trl_env.sh TRL_ENV            # once
python bench/vs_trl.py --trl TRL_ENV/bin/python [--budget 384 reward=256]

Each side of each task runs in a process of its own, one after the other. First in float32 with equal
optimisers, where the losses must agree; then each library as it comes (trl: bf16 autocast on float32 weights,
activation checkpointing; stepladder: bf16 weights with float32 masters), where time and memory are measured,
`--repeats` times, ours and theirs in turn; medians count.
Both get token ids from one file, in one order, so that nothing but the training differs.

Set alike for the float32 comparison, different by default: AdamW's second beta (.999 there, .99 here); the
order of rows (shuffled in both, by other generators); where text becomes tokens (trl renders a whole
conversation and trains what the template writes after an answer's terminator, here an answer ends with it);
the padding token (SmolLM2's is its end of turn, which transformers' classifier would read past); the reward
model's head (random there, 0 here); and KTO's batches (drawn once in both; trl takes the row before as
mismatched even where it has the same prompt). In the second part trl computes DPO's and KTO's reference with
a second model in every step, which is its default.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import HERE, Target, model_folder, parser, peer, start

TASKS = ("sft", "dpo", "kto", "reward")
BARS = {"sft": (2.2, 3.0), "dpo": (2.5, 3.5), "kto": (2.5, 3.5), "reward": (1.3, None)}  # times trl's speed
WORDS = ("plum", "pencil", "map", "tile", "button", "ribbon", "ticket", "seed", "candle", "key", "brick")


def write_data(path: Path, tokenizer: Any, *, rows: int, prompt: int, answer: int) -> None:
    """Random words: prompts of about `prompt` tokens, two answers of different lengths to each."""
    rng = random.Random(0)

    def text(tokens: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(tokens))

    with path.open("w", encoding="utf-8") as stream:
        for _ in range(rows):
            question = [{"role": "user", "content": text(rng.randint(prompt // 2, prompt))}]
            opening = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
            sides = [
                tokenizer.encode(text(rng.randint(answer // 2, answer)) + "<|im_end|>") for _ in range(2)
            ]
            stream.write(json.dumps({"prompt": opening, "chosen": sides[0], "rejected": sides[1]}) + "\n")


def budget(given: Sequence[str], task: str) -> int:
    """What `--budget 384 reward=256` says for a task."""
    chosen = dict(word.rpartition("=")[::2] for word in given)
    return int(chosen.get(task) or chosen.get("") or 768)


def worker(side: str, task: str, mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One measurement in a fresh process."""
    python = options.trl if side == "theirs" else sys.executable
    out = folder / f"{side}-{task}-{mode}.json"
    command = [python, str(HERE / f"vs_trl_{side}.py"), "--task", task, "--mode", mode, "--out", str(out)]
    command += ["--model", str(model_folder(options.model)), "--budget", str(budget(options.budget, task))]
    steps = options.agree_steps if mode == "agree" else options.steps
    command += ["--steps", str(steps), "--batch", str(options.batch), "--threads", str(options.threads)]
    print(f"{side} {task} {mode}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, "--data", str(folder / f"{mode}.jsonl")], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} {task} {mode} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def agreement(task: str, ours: dict[str, Any], theirs: dict[str, Any], lines: list[str]) -> float:
    """The largest relative difference of the losses; a line a step for people."""
    worst = 0.0
    for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"], strict=True), start=1):
        gap = abs(a - b) / max(abs(b), 1e-12)
        worst = max(worst, gap)
        lines.append(f"| {task} | {step} | {a:.6f} | {b:.6f} | {gap:.1e} |")
    return worst


def run(options: argparse.Namespace) -> list[Target]:
    from transformers import AutoTokenizer

    kept = start(options, "vs_trl", leave_out=("tasks", "modes"))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(options.model))
    lines: list[str] = []
    targets: list[Target] = []
    sides = ("ours", "theirs") if options.trl else ("ours",)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for mode, steps, shorter in (("agree", options.agree_steps, 4), ("speed", options.steps, 1)):
            prompt, answer = options.prompt // shorter, options.answer // shorter
            path, rows = folder / f"{mode}.jsonl", steps * options.batch
            write_data(path, tokenizer, rows=rows, prompt=prompt, answer=answer)
        if "agree" in options.modes and options.trl:
            lines += ["| task | step | loss, ours | loss, trl | difference |", "|---|---|---|---|---|"]
            for task in options.tasks:
                both = kept.once(
                    f"agree/{task}", lambda t=task: [worker(s, t, "agree", options, folder) for s in sides]
                )
                worst = agreement(task, *both, lines)
                targets.append(Target(f"{task} losses, largest difference", worst, 1e-4, below=True))
            lines.append("")
        if "speed" in options.modes:
            found: dict[str, dict[str, dict[str, float]]] = {}
            for task in options.tasks:
                runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
                for i in range(options.repeats):
                    for side in sides:
                        one = kept.once(
                            f"speed/{task}/{i}/{side}",
                            lambda s=side, t=task: worker(s, t, "speed", options, folder),
                        )
                        runs[side].append(one)
                found[task] = {side: medians(many) for side, many in runs.items()}
            table, more = speed_table(found)
            lines += [
                f"Batch {options.batch}, {options.steps} steps a run (the first step's warm-up is in it), "
                f"medians of {options.repeats} interleaved runs, token_budget {' '.join(options.budget)}. "
                "Tokens are those of the data (prompts of pairs counted twice), the reference pass is in "
                "the time. Peak: resident memory above what the imports took. State: weights (all "
                "copies), gradients and moments. Activations: the peak less the state. trl recomputes layers "
                "in the backward pass, its default; ours does for the reward model alone.",
                "",
                *table,
            ]
            targets += more
    kept.page("SFT, DPO, KTO and a reward model beside trl 1.16", lines, targets)
    return targets


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of every number that the runs report."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def speed_table(found: dict[str, dict[str, dict[str, float]]]) -> tuple[list[str], list[Target]]:
    lines = [
        "| task | tokens/s, ours | trl | times as fast | peak MB, ours | trl | state MB, ours | trl "
        "| activations MB, ours | trl | share |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    targets = []
    for task, sides in found.items():
        ours, theirs = sides["ours"], sides.get("theirs")
        fast = share = None
        if theirs is not None:
            fast = ours["tokens_per_second"] / theirs["tokens_per_second"]
            share = ours["activation_mb"] / max(theirs["activation_mb"], 1e-9)
        cells = [f"{ours['tokens_per_second']:.1f}", _cell(theirs, "tokens_per_second"), _ratio(fast)]
        for name in ("peak_mb", "state_mb", "activation_mb"):
            cells += [_cell(ours, name), _cell(theirs, name)]
        lines.append(f"| {task} | {' | '.join(cells)} | {_ratio(share)} |")
        why = "trl was not given"
        targets.append(Target(f"{task}, trl", fast, *BARS[task], why=why))
        targets.append(Target(f"{task}, activation memory", share, 0.5, below=True, why=why))
        if "mfu" in ours:
            name = f"{task} step, share of the matrix peak ({ours['peak_gflops']:.0f} GFLOP/s)"
            targets.append(Target(name, ours["mfu"], None, 0.6))
    return lines, targets


def _cell(side: dict[str, float] | None, name: str) -> str:
    return "-" if side is None else f"{side[name]:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    peer(made, "trl")
    made.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    made.add_argument("--modes", nargs="+", default=["agree", "speed"], choices=["agree", "speed"])
    made.add_argument("--steps", type=int, default=2)
    made.add_argument("--agree-steps", type=int, default=2, help="of the comparison of losses")
    made.add_argument("--batch", type=int, default=4, help="pairs; rows of SFT and KTO")
    made.add_argument("--prompt", type=int, default=96, help="words of a prompt, at most")
    made.add_argument("--answer", type=int, default=96, help="words of an answer, at most")
    made.add_argument("--budget", nargs="+", default=["384"], help="our token_budget, for all or TASK=N")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
