"""Rejection sampling in small: what it leaves behind, that it learns, and that no interruption shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from interruptions import Crash, at_call, crash, interrupt
from safetensors.torch import load_file
from spine import digit_recipe, lines

from stepladder import ladder
from stepladder.data.budget import Budget
from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.records import both_sides
from stepladder.errors import ConfigError, DataError, RunStopped
from stepladder.recipe.config import Recipe
from stepladder.run.folder import RunFolder
from stepladder.run.progress import Display
from stepladder.run.records import trajectory_from_dict
from stepladder.rungs import fitting
from stepladder.rungs.preference import data as preference_data
from stepladder.rungs.rejection_sampling import rung as rejection_sampling
from stepladder.rungs.sampled_pairs import sampled_pairs, sampled_row
from stepladder.workbench.bench import Workbench

SMALL = (
    "rl=null",
    "sft.epochs=2",
    "sft.batch_size=4",
    "sft.validation=0",
    "evaluation.raw=0",
    "rejection_sampling.samples=6",
    "rejection_sampling.tasks=16",
    "rejection_sampling.tasks_per_batch=6",
    "rejection_sampling.rounds=2",
    "rejection_sampling.epochs=2",
    "rejection_sampling.batch_size=2",
    "rejection_sampling.learning_rate=3e-3",
    "rejection_sampling.validation=2",
    "rejection_sampling.patience=9",
)


def small(tmp_path: Path, name: str, *overrides: str) -> Recipe:
    return digit_recipe(tmp_path, name, *SMALL, *overrides)


def train(recipe: Recipe) -> Path:
    return ladder.train(recipe, display=Display(quiet=True))


def resume(path: Path) -> Path:
    return ladder.resume(path, display=Display(quiet=True))


@pytest.fixture(autouse=True)
def _a_checkpoint_wherever_one_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small(tmp_path_factory.mktemp("quiet"), "run"))


def assert_same(got: Path, wanted: Path) -> None:
    names = ("metrics.jsonl", "evaluations.jsonl", "accepted.jsonl", "pairs.jsonl")
    for name in (*names, "trajectories/accepted.jsonl", "trajectories/rejection_sampling.jsonl"):
        assert lines(got / name) == lines(wanted / name), name
    one, other = (load_file(next((p / "final").glob("*model.safetensors"))) for p in (got, wanted))
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].numpy().tobytes() == other[key].numpy().tobytes(), key


def test_a_run_leaves_files_that_others_can_train_on(quiet: Path, tmp_path: Path) -> None:
    rows = read_dataset(quiet / "accepted.jsonl", "demonstration").records
    kept = lines(quiet / "trajectories" / "accepted.jsonl")
    assert len(rows) == len(kept) > 0
    pairs = lines(quiet / "pairs.jsonl")
    assert len(read_dataset(quiet / "pairs.jsonl", "preference")) == len(pairs) > 0
    for pair in pairs:
        assert pair["score_chosen"] > pair["score_rejected"]
        assert pair["chosen"][0]["role"] == pair["rejected"][0]["role"] == "assistant"
        assert pair["chosen"] != pair["rejected"]
    data = f"sft.data={quiet / 'accepted.jsonl'}"
    again = digit_recipe(tmp_path, "again", "rl=null", "sft.demonstrations=null", data, "sft.validation=2")
    train(again)


def test_the_samples_are_the_sampled_tokens(quiet: Path) -> None:
    """Nothing is encoded again: each sample is its turn's prompt and ids, with the engine's numbers."""
    for line in lines(quiet / "trajectories" / "accepted.jsonl"):
        line.pop("step")
        trajectory = trajectory_from_dict({**line, "seconds": 0.0})
        (sample,) = trajectory.samples
        last = trajectory.turns[-1]
        assert sample.token_ids == last.prompt_ids + last.token_ids
        assert sum(sample.mask) == trajectory.num_sampled_tokens


def test_pairs_keep_the_sampled_tokens_for_preference_optimisation(quiet: Path) -> None:
    """Each side is its episode's last prompt and ids, whatever its text would be encoded to."""
    pairs = read_dataset(quiet / "pairs.jsonl", "preference").records
    episodes = [line["turns"][-1] for line in lines(quiet / "trajectories" / "pairs.jsonl")]
    sampled = sampled_pairs(quiet, pairs)
    answers = sampled_pairs(quiet, read_dataset(quiet / "pairs.jsonl", "unpaired").records)
    assert len(episodes) == 2 * len(pairs)
    assert sampled
    for i, pair in enumerate(pairs):
        sides = sampled_row(sampled, pair, "pair-7", Budget())
        if sides is None:  # two episodes that said the same with other luck
            continue
        assert [s.trajectory_id for s in sides] == ["pair-7/chosen", "pair-7/rejected"]
        for side, turn, answer in zip(sides, episodes[2 * i :], both_sides(pair), strict=False):
            assert list(side.token_ids[-len(turn["token_ids"]) :]) == turn["token_ids"]
            (alone,) = sampled_row(answers, answer, "answer-0", Budget()) or (side,)
            assert alone.token_ids == side.token_ids
        assert sampled_row(sampled, pair, "pair-7", Budget(max_completion_tokens=1)) is None  # cut as text


def test_preference_optimisation_takes_the_sampled_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What encodes text is never asked."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a sampled answer was encoded again")

    monkeypatch.setattr(preference_data, "preference_samples", never)
    after = "preference={data = 'rejection_sampling', epochs = 1, validation = 0}"
    run = train(small(tmp_path, "run", after))
    said = json.loads((run / "data.json").read_text())["preference"]["text"]
    assert re.search(r"(\d+) of \1 in the tokens they were sampled in", said)


def test_the_metrics_say_what_was_thrown_away(quiet: Path) -> None:
    metrics = [m for m in lines(quiet / "metrics.jsonl") if m["phase"] == "rejection_sampling"]
    assert [m["step"] for m in metrics] == sorted(m["step"] for m in metrics)
    last = {m["round"]: m for m in metrics if "round" in m}
    assert set(last) == {1.0, 2.0}
    for m in last.values():
        reasons = sum(value for key, value in m.items() if key.startswith("rejected/"))
        assert reasons + m["accepted"] == 16 * 6
        assert m["acceptance"] == m["accepted"] / 96
    kept = lines(quiet / "trajectories" / "accepted.jsonl")
    assert len(kept) == sum(m["accepted"] for m in last.values())


def test_the_second_round_samples_from_what_the_first_one_made(quiet: Path) -> None:
    """Versions: 0 is the raw model, 1 after SFT, 2 after the first round."""
    versions = [
        {v for turn in line["turns"] for v, _ in turn["versions"]}
        for line in lines(quiet / "trajectories" / "rejection_sampling.jsonl")
    ]
    assert set().union(*versions[:96]) == {1}
    assert set().union(*versions[96:]) == {2}
    ids = [line["task"]["id"] for line in lines(quiet / "trajectories" / "rejection_sampling.jsonl")]
    assert not set(ids[:96]) & set(ids[96:])  # other tasks, until the split is through


def test_it_learns_what_it_accepted(tmp_path: Path) -> None:
    """Correct guesses of the digit are imitated: the loss on the accepted tokens falls."""
    path = train(small(tmp_path, "run", "rejection_sampling.rounds=1", "rejection_sampling.epochs=6"))
    phase = [m for m in lines(path / "metrics.jsonl") if m["phase"] == "rejection_sampling"]
    losses = [m["nll"] for m in phase if "nll" in m]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert [e["rung"] for e in lines(path / "evaluations.jsonl")] == ["sft", "rejection_sampling"]


def test_a_restarted_round_fits_the_weights_that_the_rung_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STaR begins each fit with the weights after SFT, RAFT with those of the round before."""
    began: list[dict[str, Any]] = []
    honest = fitting.run_sft

    def watched(policy: Any, *args: Any, **kwargs: Any) -> Any:
        began.append({n: p.detach().clone() for n, p in policy.trainable().items()})
        return honest(policy, *args, **kwargs)

    monkeypatch.setattr(fitting, "run_sft", watched)
    all_of_them = "rejection_sampling.validation=0"  # else the best weights may be those of the beginning
    train(small(tmp_path, "star", "rejection_sampling.restart=true", all_of_them))
    _, first, second = began  # SFT, and two rounds
    assert all((first[n] == second[n]).all() for n in first)
    began.clear()
    train(small(tmp_path, "raft", all_of_them))
    _, first, second = began
    assert any((first[n] != second[n]).any() for n in first)


PLACES = [
    pytest.param(Workbench, "play", 2, False, id="first-sampling"),
    pytest.param(RunFolder, "log_trajectories", 2, True, id="half-written"),
    pytest.param(Workbench, "play", 5, True, id="second-round"),
    pytest.param(fitting, "sft_update", 26, True, id="inside-the-first-fit"),
    pytest.param(fitting, "validation_loss", 2, False, id="validation"),
    pytest.param(fitting, "sft_update", 32, True, id="inside-the-second-fit"),
]


@pytest.mark.parametrize(("owner", "name", "call", "after"), PLACES)
def test_a_run_resumed_after_a_crash_is_the_quiet_run(
    tmp_path: Path,
    quiet: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, crash, after=after)
        with pytest.raises(Crash):
            train(small(tmp_path, "run"))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        pytest.param(Workbench, "play", 2, False, id="sampling"),
        pytest.param(rejection_sampling, "select", 7, True, id="selection"),
        pytest.param(fitting, "sft_update", 26, False, id="fit"),
    ],
)
def test_a_run_resumed_after_ctrl_c_is_the_quiet_run(
    tmp_path: Path,
    quiet: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, interrupt, after=after)
        with pytest.raises(RunStopped, match="at rejection_sampling step"):
            train(small(tmp_path, "run"))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_a_restarted_rung_resumes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = train(small(tmp_path, "calm", "rejection_sampling.restart=true"))
    with monkeypatch.context() as patch:
        at_call(patch, fitting, "sft_update", 32, crash, after=True)
        with pytest.raises(Crash):
            train(small(tmp_path, "run", "rejection_sampling.restart=true"))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", calm)


def test_a_round_that_accepts_nothing_says_so(tmp_path: Path) -> None:
    """A model from scratch, one sample: nothing is solved."""
    recipe = small(tmp_path, "run", "sft=null", "rejection_sampling.samples=1", "rejection_sampling.tasks=2")
    with pytest.raises(DataError, match=r"kept nothing to fit: 0 of 2 .*samples = 4"):
        train(recipe)


def test_more_tasks_than_there_are_is_refused_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rejection_sampling\.tasks = "):
        train(small(tmp_path, "run", "rejection_sampling.tasks=10000000"))
    assert not (tmp_path / "run").exists()
