"""SFT, DPO, KTO and a reward model beside trl 1.16: same file, model, batches and steps.

bench/make_trl_env.sh TRL_ENV            # once
python bench/vs_trl.py --peer TRL_ENV/bin/python

Each side of each task runs in a process of its own, one after the other. First in float32 with equal
optimisers, where the losses must agree; then each library as it comes (trl: bf16 autocast on float32 weights,
activation checkpointing; stepladder: bf16 weights with float32 masters), where time and memory are measured.
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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TASKS = ("sft", "dpo", "kto", "reward")
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


def worker(side: str, task: str, mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One measurement in a fresh process."""
    python = options.peer if side == "theirs" else sys.executable
    out = folder / f"{side}-{task}-{mode}.json"
    command = [python, str(HERE / f"vs_trl_{side}.py"), "--task", task, "--mode", mode, "--out", str(out)]
    for name in ("model", "steps", "batch", "threads", "budget"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run([*command, "--data", str(folder / "data.jsonl")], capture_output=True, text=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", required=True, help="Python of the environment with trl")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a bundled name or a local folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--modes", nargs="+", default=["agree", "speed"], choices=["agree", "speed"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="pairs; rows of SFT and KTO")
    parser.add_argument("--prompt", type=int, default=96, help="words of a prompt, at most")
    parser.add_argument("--answer", type=int, default=96, help="words of an answer, at most")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--budget", type=int, default=768, help="our token_budget: tokens a micro-batch")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()

    from transformers import AutoTokenizer

    from stepladder.policies.bundled import BUNDLED, ensure_bundled

    if options.model in BUNDLED:
        options.model = str(ensure_bundled(options.model))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = options.steps * options.batch
        write_data(folder / "data.jsonl", tokenizer, rows=rows, prompt=options.prompt, answer=options.answer)
        if "agree" in options.modes:
            lines += ["| task | step | loss, ours | loss, trl | difference |", "|---|---|---|---|---|"]
            for task in options.tasks:
                both = [worker(side, task, "agree", options, folder) for side in ("ours", "theirs")]
                worst = agreement(task, *both, lines)
                print(f"{task}: largest difference of a loss {worst:.1e}", flush=True)
        if "speed" in options.modes:
            lines += ["", *speed_table([(t, *_both(t, options, folder)) for t in options.tasks])]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _both(task: str, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return worker("ours", task, "speed", options, folder), worker("theirs", task, "speed", options, folder)


def speed_table(rows: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Tokens of the data (prompts of pairs counted twice) a second, the reference pass included; peak memory
    of the process above what the imports took; and that less weights, gradients and optimiser state."""
    table = [
        "| task | tokens/s, ours | trl | times as fast | peak MB, ours | trl | activations MB, ours | trl "
        "| share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, ours, theirs in rows:
        fast = ours["tokens_per_second"] / theirs["tokens_per_second"]
        share = ours["activation_mb"] / max(theirs["activation_mb"], 1e-9)
        table.append(
            f"| {task} | {ours['tokens_per_second']:.1f} | {theirs['tokens_per_second']:.1f} | {fast:.2f} "
            f"| {ours['peak_mb']:.0f} | {theirs['peak_mb']:.0f} | {ours['activation_mb']:.0f} "
            f"| {theirs['activation_mb']:.0f} | {share:.2f} |"
        )
    return table


if __name__ == "__main__":
    main()
