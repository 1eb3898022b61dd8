"""A run folder made up with plausible numbers, for the tests of the reports."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

FAMILIES = ("add", "subtract", "multiply", "two_operations", "distractor", "no_tool")


def trajectory(
    task: str, answer: str, score: float | None, tool: bool, rng: random.Random, domain: str = "add"
) -> dict[str, Any]:
    """One episode: with a tool call and its result, or an answer straight away."""
    call = (
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": "348 + 276"}}\n</tool_call><|im_end|>'
    )
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You can use this tool:\ncalculate(expression: str)"},
        {"role": "user", "content": "A farm has 348 hens and buys 276 more. How many are there now?"},
    ]
    sampled = [call, f"There are {answer} hens.<|im_end|>"] if tool else [f"{answer}<|im_end|>"]
    turns = []
    for i, text in enumerate(sampled):
        messages.append({"role": "assistant", "content": text, "raw": text})
        if tool and i == 0:
            messages.append({"role": "tool", "content": "624"})
        pieces = [text[k : k + 4] for k in range(0, len(text), 4)]
        logprobs = [-abs(rng.gauss(0, 0.4)) for _ in pieces]
        turns.append({"token_texts": pieces, "logprobs": logprobs, "token_ids": list(range(len(pieces)))})
    return {
        "id": task,
        "task": {"id": task, "domain": domain},
        "messages": messages,
        "turns": turns,
        "rewards": [score],
        "score": {"value": score, "parts": {"correct": score}, "explanation": ""},
        "stop_reason": "terminated",
        "failure": None,
    }


def evaluation(
    rung: str, step: int, success: float, tool: float, n: int, rng: random.Random
) -> dict[str, Any]:
    """One line of evaluations.jsonl."""
    solved = round(success * n)
    half = 1.96 * math.sqrt(success * (1 - success) / n + 1e-4)
    examples = [
        trajectory(
            f"test/{i}",
            "624" if i < round(success * 4) else "511",
            float(i < round(success * 4)),
            tool > 0.5,
            rng,
        )
        for i in range(4)
    ]
    return {
        "rung": rung,
        "step": step,
        "n": n,
        "success": solved / n,
        "interval": [max(0.0, success - half), min(1.0, success + half)],
        "tool_rate": tool,
        "by_domain": {
            name: {"n": n // 6, "success": min(1.0, max(0.0, success + rng.gauss(0, 0.1)))}
            for name in FAMILIES
        },
        "seconds": 20.0 + step,
        "temperature": 1.0,
        "examples": examples,
    }


def write_run(path: Path, steps: int = 60) -> Path:
    """A whole run: raw, few-shot, SFT, RL with evaluations on the way."""
    rng = random.Random(0)
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text('seed = 0\n\n[model]\nname = "smollm2-135m-instruct"\n')
    environment = {
        "device": "cpu",
        "cpu": "Some CPU",
        "threads": 2,
        "packages": {"torch": "2.13.0"},
        "git": None,
    }
    (path / "environment.json").write_text(json.dumps(environment))
    metrics = []
    for step in range(40):
        loss = 2.5 * math.exp(-step / 8) + 0.3 + rng.gauss(0, 0.03)
        value = loss + 0.05 if step % 5 == 0 else None
        metrics.append(
            {"step": step, "phase": "sft", "loss": loss, "validation_loss": value, "grad_norm": 1.5}
        )
    evaluations = [
        evaluation("raw", 0, 0.01, 0.0, 100, rng),
        evaluation("few-shot", 0, 0.03, 0.04, 100, rng),
        evaluation("sft", 40, 0.46, 0.7, 200, rng),
    ]
    for step in range(steps):
        p = 0.46 + 0.38 * (1 - math.exp(-step / 15))
        metrics.append(
            {
                "step": step,
                "phase": "rl",
                "reward": p + rng.gauss(0, 0.05),
                "success": min(1.0, max(0.0, p + rng.gauss(0, 0.05))),
                "tool_rate": min(1.0, 0.7 + step / 150),
                "entropy": 0.5 * math.exp(-step / 30) + 0.05,
                "grad_norm": abs(rng.gauss(0.4, 0.1)),
                "response_length": 38 - step / 10 + rng.gauss(0, 1),
                "tokens_per_second": 900 + rng.gauss(0, 40),
                "log_ratio_abs": 0.03 + rng.gauss(0, 0.002),
                "learning_rate": 3e-6,
                "clip_fraction": abs(rng.gauss(0.02, 0.01)),
            }
        )
        if step % 15 == 14:
            evaluations.append(evaluation("rl", step, p, 0.95, 200, rng))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (path / "evaluations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluations))
    return path
