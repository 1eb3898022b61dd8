"""Small runs of reward models with a known scorer: a letter is worth having, for the tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from spine import SIZES, lines

from stepladder import ladder
from stepladder.recipe.config import Recipe, load_recipe
from stepladder.run.progress import Display

LETTERS = "abcdef"
SYMBOLS = [*LETTERS, "?", "\n"]


def worth(answer: str) -> int:
    """The known scorer: how many a's."""
    return answer.count("a")


def draw(rng: random.Random, n: int = 5) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(n))


def write_pairs(path: Path, count: int = 160, *, seed: int = 0, margins: bool = False) -> Path:
    """Pairs that `worth` ranked, as a JSONL file; every row has a prompt of its own."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        answers = sorted((draw(rng), draw(rng)), key=worth, reverse=True)
        if worth(answers[0]) > worth(answers[1]):
            row: dict[str, Any] = {"prompt": draw(rng, 6) + "?", "chosen": answers[0], "rejected": answers[1]}
            if margins:
                row["margin"] = float(worth(answers[0]) - worth(answers[1]))
            rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rankings(path: Path, count: int = 60, *, seed: int = 0) -> Path:
    rng, rows = random.Random(seed), []
    for _ in range(count):
        answers = [draw(rng) for _ in range(4)]
        scores = [worth(answer) for answer in answers]
        rows.append({"prompt": draw(rng, 6) + "?", "completions": answers, "scores": scores})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_steps(path: Path, count: int = 160, *, seed: int = 0) -> Path:
    """A step is right where it has no f."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        steps = [draw(rng, 2) for _ in range(3)]
        rows.append(
            {"prompt": draw(rng, 6) + "?", "steps": steps, "labels": ["f" not in step for step in steps]}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(out: Path, name: str, section: str, data: Path, *overrides: str) -> Recipe:
    sections: dict[str, Any] = {
        "run": {"name": name, "out": str(out), "threads": 1},
        "model": {"name": "tiny", "dtype": "float32", "options": {"symbols": SYMBOLS, **SIZES}},
        section: {
            "data": str(data),
            "epochs": 6,
            "batch_size": 16,
            "learning_rate": 1e-2,
            "validation": 40,
            "patience": 6,
        },
        "evaluation": {"raw": 0},
    }
    return load_recipe(sections, overrides)


def train(recipe: Recipe) -> Path:
    return ladder.train(recipe, display=Display(quiet=True))


def resume(path: Path) -> Path:
    return ladder.resume(path, display=Display(quiet=True))


def left_behind(run: Path, section: str) -> dict[str, Any]:
    """All that two runs of one recipe must have in common, bit for bit."""
    (file,) = (run / section).glob("*model.safetensors")
    return {
        "weights": {name: tensor.float().numpy().tobytes() for name, tensor in load_file(file).items()},
        "info": json.loads((run / section / "reward_model.json").read_text()),
        "metrics": lines(run / "metrics.jsonl"),
    }
