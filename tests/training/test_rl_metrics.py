"""What a line of metrics.jsonl says, against the trajectories of the same step."""

from __future__ import annotations

from pathlib import Path

from spine import digit_recipe, lines

from stepladder.training import ladder
from stepladder.training.progress import Display


def test_sampled_and_trained_tokens_have_names_of_their_own(tmp_path: Path) -> None:
    """One pair of episodes a step: where both earn the same, tokens were sampled and none trained on."""
    small = ("rl.tasks_per_step=1", "rl.group_size=2", "rl.steps=8", "evaluation.raw=0", "evaluation.tasks=1")
    path = ladder.train(digit_recipe(tmp_path, "run", *small), display=Display(quiet=True))
    sampled: dict[int, int] = {}
    for t in lines(path / "trajectories" / "rl.jsonl"):
        sampled[t["step"]] = sampled.get(t["step"], 0) + sum(len(turn["token_ids"]) for turn in t["turns"])
    metrics = [m for m in lines(path / "metrics.jsonl") if m["phase"] == "rl"]
    assert {m["updated"] for m in metrics} == {0.0, 1.0}
    assert {m["step"]: m["sampled_tokens"] for m in metrics} == sampled
    for m in metrics:  # both of a pair with different rewards have an advantage
        assert m["trained_tokens"] == (m["sampled_tokens"] if m["updated"] else 0.0)
        assert "tokens" not in m
