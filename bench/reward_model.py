"""A reward model on a real model, and what becomes of its scores: python bench/reward_model.py --out runs

Trains the recipe `reward-model` (SmolLM2-135M-Instruct, LoRA), then compares the scores of twelve answers it
has not seen: as trained, reloaded, merged, and by transformers' own class with padding on either side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from stepladder import ladder
from stepladder.environments.worlds.reviews import ReviewsWorld
from stepladder.policies.conversation_scorer import ConversationScorer
from stepladder.policies.reward_folder import pad_for_scoring, save_scored
from stepladder.policies.scored import load_scored
from stepladder.recipe.config import load_recipe
from stepladder.types import Message

Talk = list[Message]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as reward_model.epochs=3")
    given = parser.parse_args()
    recipe = load_recipe("reward-model", [f"run.out={given.out}", *given.overrides])
    run = given.out / recipe.run.name
    if (run / "recipe.toml").is_file():
        ladder.resume(run)
    else:
        ladder.train(recipe)
    print((run / "summary.txt").read_text(encoding="utf-8"))
    compare(run / "reward_model", given.out / "merged")


def compare(folder: Path, merged: Path) -> None:
    """Print the largest differences between the scores of one model, kept in several ways."""
    pairs = ReviewsWorld(seed=77).preferences(6, 5)
    talks = [[*pair.prompt, *side] for pair in pairs for side in (pair.chosen, pair.rejected)]
    model, info = load_scored(folder, dtype="float32", device="cpu")
    first = scores(ConversationScorer(model, info), talks)
    again = scores(ConversationScorer.load(folder, dtype="float32", device="cpu"), talks)
    save_scored(model, merged, info, merged=True)
    scorer = ConversationScorer.load(merged, dtype="float32", device="cpu")
    whole = scores(scorer, talks)
    right = int((first[0::2] > first[1::2]).sum())
    print(f"unseen pairs ordered right: {right} of {len(pairs)}; the scores' spread is {first.std():.2f}")
    print(f"largest difference, reloaded: {(first - again).abs().max():.1e}")
    print(f"largest difference, merged: {(first - whole).abs().max():.1e}")
    theirs = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32).eval()
    for side in ("left", "right"):
        found = by_transformers(theirs, scorer, talks, side)
        print(f"largest difference, transformers, padded on the {side}: {(found - whole).abs().max():.1e}")


def scores(scorer: ConversationScorer, talks: list[Talk]) -> torch.Tensor:
    return torch.tensor(scorer.scores(talks))


def by_transformers(
    model: torch.nn.Module, scorer: ConversationScorer, talks: list[Talk], side: str
) -> torch.Tensor:
    """The scores of one padded batch by `AutoModelForSequenceClassification`."""
    pad = pad_for_scoring(scorer.model.tokenizer)
    rows = [
        scorer.renderer.demonstration(talk, trajectory_id="t", train="last_turn")[0].token_ids
        for talk in talks
    ]
    width = max(map(len, rows)) + 4
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[b, where], mask[b, where] = torch.tensor(row), 1
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    return out.logits[:, 0]


if __name__ == "__main__":
    main()
