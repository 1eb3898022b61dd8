"""Does a transformer from scratch learn to search? Exact probabilities after training, over seeds.

    python bench/hidden_digit.py --out runs/proof

Prints, per seed, P(search) at the start and P(correct | digit seen), read off the trained model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from stepladder.data.chat.renderer import Renderer
from stepladder.environments.worlds.hidden_digit import QUESTION, SEARCH
from stepladder.ladder import train
from stepladder.policies.pretrained import load_model
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display
from stepladder.types import Generation, Message, Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/proof")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for seed in args.seeds:
        began = time.monotonic()
        recipe = load_recipe(
            "hidden_digit", [f"run.out={args.out}", f"run.name=digit{seed}", f"run.seed={seed}"]
        )
        folder = train(recipe, overwrite=True, display=Display(quiet=True))
        seconds = time.monotonic() - began
        search, right = probabilities(folder)
        print(
            f"seed {seed}: P(search) {search:.4f}, P(correct | seen) {right:.4f}, {seconds:.0f} s in all",
            flush=True,
        )


@torch.no_grad()
def probabilities(folder: Path) -> tuple[float, float]:
    """P(first token = S), and the mean over digits of P(first token = digit | S, digit)."""
    model, tokenizer = load_model(str(folder / "final"), dtype="float32", device="cpu")
    renderer = Renderer(tokenizer)

    def next_token(ids: tuple[int, ...]) -> torch.Tensor:
        return model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)

    start = renderer.start([Message("user", QUESTION)])
    search_id = renderer.control.encode(SEARCH)[0]
    search = float(next_token(start.prompt_ids)[search_id])
    right = []
    for digit in "01234":
        conversation = renderer.start([Message("user", QUESTION)])
        ids = (search_id, *renderer.stop_token_ids[:1])
        conversation.add_turn(Generation(ids, (0.0, 0.0), ((0, 2),), "stop"), Sampling())
        conversation.add_messages([Message("user", digit)])
        right.append(float(next_token(conversation.prompt_ids)[renderer.control.encode(digit)[0]]))
    return search, sum(right) / len(right)


if __name__ == "__main__":
    main()
