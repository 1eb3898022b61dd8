"""What a line of metrics.jsonl says, against the trajectories of the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spine import digit_recipe, lines, sample

from stepladder import ladder
from stepladder.algorithms import ALGORITHMS
from stepladder.engines.local.engine import LocalEngine
from stepladder.run.progress import Display
from stepladder.rungs.rl import loop as rl
from stepladder.rungs.rl.credit import make_batch
from stepladder.types import Group, Score, Task, TrainingSample, Trajectory


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


@pytest.mark.parametrize(
    ("more", "rests"), [((), True), (("rl.off_policy.max_staleness=1", "run.exact=false"), False)]
)
def test_the_engine_rests_in_each_update_unless_it_plays_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], rests: bool
) -> None:
    """In the first one too, whatever the checks before it made the engine compute."""
    held: list[int] = []
    engines: list[LocalEngine] = []
    made, update = LocalEngine.__init__, rl.rl_update

    def remembered(self: LocalEngine, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        engines.append(self)

    def watched(*args: Any, **kwargs: Any) -> Any:
        held.append(engines[-1]._scheduler.store.kv.numel())  # type: ignore[union-attr]
        return update(*args, **kwargs)

    monkeypatch.setattr(LocalEngine, "__init__", remembered)
    monkeypatch.setattr(rl, "rl_update", watched)
    small = ("rl.tasks_per_step=2", "rl.group_size=2", "rl.steps=3", "evaluation.raw=0", "evaluation.tasks=1")
    ladder.train(digit_recipe(tmp_path, "run", *small, *more), display=Display(quiet=True))
    assert len(held) == 3
    assert all(n == 0 for n in held) if rests else any(held)


def test_a_group_that_shrinks_to_one_is_left_out_as_a_whole() -> None:
    """Two were scored, but one said nothing: a single member has no baseline. The other group stays."""
    task = Task("t")
    said = sample([1, 2, 3], 1)

    def episode(value: float, *samples: TrainingSample) -> Trajectory:
        return Trajectory("i", "g", task, (), (), (), Score(value), "terminated", samples=samples)

    shrunk = Group("a", task, (episode(1.0, said), episode(0.0)))
    whole = Group("b", task, (episode(1.0, said), episode(0.0, said)))
    batch = make_batch([shrunk, whole], ALGORITHMS["grpo"])
    assert len(batch.samples) == 2
    assert batch.group_index.tolist() == [1, 1]
    assert batch.advantages[0] > 0 > batch.advantages[1]
    assert make_batch([shrunk], ALGORITHMS["grpo"]).samples == []
