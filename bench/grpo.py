"""A GRPO step beside trl 1.16's GRPOTrainer: 32 completions of 64 tokens, 8 to a prompt.

    python bench/grpo.py --trl TRL_ENV/bin/python [--model FOLDER]

Generation, reward, update and (ours) weight sync; the same model, texts and number of tokens, none of
which ends early. Each side runs in a process of its own. First, in float32 and on given completions, the
norms of the first gradients must agree (the losses are 0 at a ratio of 1). Then each library as it comes:
trl with its defaults (bf16 autocast on float32 weights, activation checkpointing, 8 completions a
micro-batch), and with checkpointing off; stepladder with bf16 weights, float32 masters, the in-process
engine and a group a micro-batch. The best of trl's two counts.

The first step of each process is a warm-up. Short prompts come first, then long ones; trl takes minutes for a
long step, so there it makes `--long-steps` only.
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

from decode import make_prompts
from measuring import HERE, Target, model_folder, parser, peer, start

MODES = ("default", "no-checkpointing")


def make_steps(
    tokenizer: Any, options: argparse.Namespace, counts: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Steps of both kinds of prompts: (kind, how many). Texts that encode to the wanted lengths again."""
    draw, steps, seed = random.Random(0), [], 0
    for kind, count in counts:
        for _ in range(count):
            seed += 1
            prompts = options.completions // options.group
            lengths = [draw.randint(20, 40) if kind == "short" else options.long for _ in range(prompts)]
            texts = [tokenizer.decode(ids) for ids in make_prompts(tokenizer, lengths, seed)]
            steps.append({"kind": kind, "texts": texts, "completions": []})
    return steps


def given_completions(step: dict[str, Any], options: argparse.Namespace) -> None:
    """Random words of different lengths, for the comparison of gradients."""
    draw = random.Random(1)
    step["completions"] = [
        [draw.randint(300, 1000) for _ in range(draw.randint(options.new // 2, options.new))]
        for _ in range(len(step["texts"]) * options.group)
    ]


def worker(
    side: str, mode: str, options: argparse.Namespace, steps: list[dict[str, Any]], **sizes: int
) -> dict[str, Any]:
    """One process on these steps."""
    python = options.trl if side == "theirs" else sys.executable
    with tempfile.TemporaryDirectory() as scratch:
        data, out = Path(scratch) / "steps.json", Path(scratch) / "out.json"
        data.write_text(json.dumps(steps), encoding="utf-8")
        command = [python, str(HERE / f"grpo_{side}.py"), "--mode", mode, "--data", str(data)]
        command += ["--out", str(out), "--model", str(model_folder(options.model))]
        for name in ("group", "new", "micro", "threads"):
            command += [f"--{name}", str(sizes.get(name, getattr(options, name)))]
        print(f"{side} {mode}: {len(steps)} steps", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{side} {mode} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {**found, "kinds": [s["kind"] for s in steps]}


def of_kind(found: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Median seconds and largest peak of the steps of a kind, the process's first step left out."""
    at = [i for i, k in enumerate(found["kinds"]) if k == kind and i > 0]
    if not at:
        return None
    return {
        "steps": len(at),
        "seconds": statistics.median(found["seconds"][i] for i in at),
        "peak_mb": max(found["peak_mb"][i] for i in at),
        "activation_mb": max(found["activation_mb"][i] for i in at),
        "state_mb": found["state_mb"],
    }


def agree(tokenizer: Any, options: argparse.Namespace) -> float:
    """The largest relative difference of the gradients' norms over two steps."""
    few = argparse.Namespace(**{**vars(options), "completions": 2 * options.group, "new": 16})
    steps = make_steps(tokenizer, few, [("short", 2)])
    for step in steps:
        given_completions(step, few)
    micro = min(options.micro, few.completions)
    both = [worker(side, "agree", options, steps, new=16, micro=micro) for side in ("ours", "theirs")]
    return max(abs(a - b) / b for a, b in zip(both[0]["norms"], both[1]["norms"], strict=True))


def table(
    ours: dict[str, Any], theirs: dict[str, dict[str, Any]], tokens: int
) -> tuple[list[str], list[Target]]:
    lines = [
        "| prompts | who | steps | s a step | generated tokens/s | peak MB | state MB | activations MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    targets = []
    for kind, least, aim in (("short", 3.0, 4.0), ("long", 6.0, 8.0)):
        sides = {"ours": of_kind(ours, kind)}
        sides |= {f"trl, {mode}": of_kind(found, kind) for mode, found in theirs.items()}
        known = {name: s for name, s in sides.items() if s is not None}
        for name, s in known.items():
            lines.append(
                f"| {kind} | {name} | {s['steps']} | {s['seconds']:.2f} | {tokens / s['seconds']:.0f} "
                f"| {s['peak_mb']:.0f} | {s['state_mb']:.0f} | {s['activation_mb']:.0f} |"
            )
        peers = [s for name, s in known.items() if name != "ours"]
        if "ours" not in known or not peers:
            targets.append(
                Target(f"GRPO step, {kind} prompts, trl", None, least, aim, why="trl was not given")
            )
            continue
        best = min(peers, key=lambda s: s["seconds"])
        speed = best["seconds"] / known["ours"]["seconds"]
        targets.append(Target(f"GRPO step, {kind} prompts, trl", speed, least, aim))
        # against the leaner of trl's modes; its fastest is the one without checkpointing
        leanest = min(s["activation_mb"] for s in peers)
        share = known["ours"]["activation_mb"] / leanest
        targets.append(Target(f"GRPO step, {kind} prompts, activation memory", share, 0.5, below=True))
    return lines, targets


def run(options: argparse.Namespace) -> list[Target]:
    from transformers import AutoTokenizer

    kept = start(options, "grpo")
    tokenizer = AutoTokenizer.from_pretrained(model_folder(options.model))
    lines: list[str] = []
    targets: list[Target] = []
    theirs: dict[str, dict[str, Any]] = {}
    if options.trl:
        gap = kept.once("agree", lambda: agree(tokenizer, options))
        lines += [f"Largest relative difference of the gradients' norms in float32: {gap:.1e}.", ""]
        targets.append(Target("GRPO gradient norms, relative difference", gap, 1e-3, below=True))
    counts = [("short", 1 + options.repeats), ("long", options.repeats)]
    ours = kept.once(
        "ours", lambda: worker("ours", "default", options, make_steps(tokenizer, options, counts))
    )
    counts = [("short", 1 + options.repeats), ("long", options.long_steps)]
    for mode in options.modes if options.trl else ():
        theirs[mode] = kept.once(
            f"trl {mode}",
            lambda m=mode: worker("theirs", m, options, make_steps(tokenizer, options, counts)),
        )
    table_lines, found = table(ours, theirs, options.completions * options.new)
    lines += [
        f"{options.completions} completions of {options.new} tokens, {options.group} to a prompt; short "
        f"prompts have 20 to 40 tokens, long ones {options.long}. The process's first step is left out. "
        "State: weights (all copies, ours with the engine's), gradients, moments. Activations: the step's "
        "peak of resident memory less what the imports took and less the state.",
        "",
        *table_lines,
    ]
    kept.page("A GRPO step beside trl", lines, [*targets, *found])
    return targets + found


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    peer(made, "trl")
    made.add_argument("--completions", type=int, default=32)
    made.add_argument("--group", type=int, default=8)
    made.add_argument("--new", type=int, default=64)
    made.add_argument("--long", type=int, default=512, help="tokens of a long prompt")
    made.add_argument("--long-steps", type=int, default=1, help="long steps of trl, each takes minutes")
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of trl")
    made.add_argument("--micro", type=int, default=8, help="trl's completions a micro-batch, its default")
    return made


if __name__ == "__main__":
    run(options_parser().parse_args())
