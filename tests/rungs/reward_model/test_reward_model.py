"""A reward model on pairs made by a known scorer: it learns them, and no interruption shows afterwards."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import scoring_runs as runs
import torch
from interruptions import Crash, at_call, crash, interrupt
from rich.console import Console
from spine import sample, tiny_policy

from stepladder import ladder
from stepladder.commands.inspect import inspect_recipe
from stepladder.data.files.split import split_by_content, split_key
from stepladder.errors import ConfigError, DataError, RunStopped
from stepladder.objectives.reward_model import bradley_terry_ranked
from stepladder.policies.conversation_scorer import ConversationScorer
from stepladder.policies.heads import ScalarHead, ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.rungs.reward_model import rung as reward_model
from stepladder.rungs.reward_model import scoring as scoring_rung
from stepladder.rungs.reward_model.ranking_update import (
    Ranked,
    cut_rows,
    ranked_losses,
    ranking_update,
    ranking_validation,
)
from stepladder.rungs.reward_model.reliability import reliability
from stepladder.rungs.reward_model.scoring_files import read_ranked
from stepladder.types import Message


@pytest.fixture(autouse=True)
def _a_checkpoint_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("quiet")
    return runs.train(runs.recipe(folder, "run", "reward_model", runs.write_pairs(folder / "pairs.jsonl")))


# -- what it learns ----------------------------------------------------------------------------------------


def test_it_ranks_held_out_pairs_as_the_known_scorer_does(quiet: Path) -> None:
    info = json.loads((quiet / "reward_model" / "reward_model.json").read_text())
    assert info["held_out"]["validation_accuracy"] > 0.9
    assert info["held_out"]["validation_ece"] < 0.25
    assert sum(n for _, _, n in info["reliability"]) == 40
    # and answers of lengths it has not seen, made anew: one more a is worth more
    scorer, rng = (
        ConversationScorer.load(quiet / "reward_model", dtype="float32", device="cpu"),
        random.Random(9),
    )
    right = 0
    for _ in range(50):
        prompt, low = Message("user", runs.draw(rng, 6) + "?"), runs.draw(rng, 5).replace("a", "b")
        high = low[:2] + "aa" + low[4:]
        one, other = scorer.scores([[prompt, Message("assistant", s)] for s in (high, low)])
        assert one is not None
        assert other is not None
        right += one > other
    assert right >= 45


def test_it_is_saved_with_the_normalisation_of_its_training_scores(quiet: Path) -> None:
    """The scores of the training answers, computed one by one by the saved model, have that mean and std."""
    info = json.loads((quiet / "reward_model" / "reward_model.json").read_text())
    train, _ = split_by_content(read_ranked(str(quiet.parent / "pairs.jsonl")).records, 40, 0)
    scorer = ConversationScorer.load(quiet / "reward_model", dtype="float32", device="cpu")
    talks = [[*row.prompt, *side] for row in train for side in (row.chosen, row.rejected)]  # type: ignore[union-attr]
    scores = torch.tensor(scorer.scores(talks), dtype=torch.float64)
    assert float(scores.mean()) == pytest.approx(info["mean"], abs=1e-5)
    assert float(scores.std(correction=0)) == pytest.approx(info["std"], abs=1e-5)


def test_the_policy_is_not_touched_and_not_exported(quiet: Path) -> None:
    assert not (quiet / "final").exists()
    assert "reward_model:" in (quiet / "summary.txt").read_text()


def test_fault_81_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    """Half of the rows repeat the prompt of another row: they go to one side together."""
    rows = [
        json.loads(line)
        for line in runs.write_pairs(tmp_path / "p.jsonl", 60).read_text().split("\n")
        if line
    ]
    for first, second in zip(rows[::2], rows[1::2]):
        second["prompt"] = first["prompt"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held = split_by_content(read_ranked(str(tmp_path / "p.jsonl")).records, 20, 0)
    assert len(held) == 20
    assert not {split_key(r) for r in train} & {split_key(r) for r in held}


@pytest.mark.parametrize("kind", ["rankings", "margins", "adapter", "bf16"])
def test_other_kinds_of_data_and_models_learn_too(tmp_path: Path, kind: str) -> None:
    extra: tuple[str, ...] = ()
    if kind == "rankings":
        file = runs.write_rankings(tmp_path / "r.jsonl", 100)
    else:
        file = runs.write_pairs(tmp_path / "p.jsonl", margins=kind == "margins")
    if kind == "margins":
        extra = ("reward_model.margin=data",)
    if kind == "adapter":
        extra = ("model.lora.rank=16", "reward_model.learning_rate=3e-2", "reward_model.epochs=12")
    if kind == "bf16":
        extra = ("model.dtype=bfloat16",)
    path = runs.train(runs.recipe(tmp_path, "run", "reward_model", file, *extra))
    info = json.loads((path / "reward_model" / "reward_model.json").read_text())
    assert info["held_out"]["validation_accuracy"] > 0.8, info["held_out"]


# -- the loss ----------------------------------------------------------------------------------------------


def ranked(ids: list[tuple[int, ...]], group: str, ranks: list[int] | None = None) -> Ranked:
    ranks = ranks or list(range(len(ids)))
    pairs = [(i, j) for i in range(len(ids)) for j in range(len(ids)) if ranks[i] < ranks[j]]
    better, worse = zip(*pairs, strict=True)
    samples = tuple(sample(i, 2, trajectory=group, group=group) for i in ids)
    return Ranked(samples, better, worse, (0.0,) * len(pairs))


def test_a_pair_by_hand_and_a_ranking_is_the_mean_of_its_pairs() -> None:
    """r = (1.2, .7): 0.474077 (spec); three ranked answers: the mean over their three pairs."""
    rows = [ranked([(9, 10, 11), (9, 10, 12)], "g"), ranked([(9, 10, k) for k in (13, 14, 15)], "h")]
    scores = torch.tensor([1.2, 0.7, 2.0, -1.0, 0.5])
    losses, differences, metrics = ranked_losses(scores, rows, centring=0.0)
    assert float(losses[0]) == pytest.approx(0.474077, abs=1e-6)
    assert float(losses[1]) == pytest.approx(float(bradley_terry_ranked(scores[2:])))
    torch.testing.assert_close(differences, torch.tensor([0.5, 3.0, 1.5, -1.5]))
    assert float(metrics["accuracy"]) == 0.75


def test_answers_of_equal_rank_make_no_pair() -> None:
    row = ranked([(9, 10, k) for k in (13, 14, 15)], "h", [0, 1, 1])
    assert list(zip(row.better, row.worse)) == [(0, 1), (0, 2)]


def test_fault_80_centring_fixes_the_offset_that_the_loss_leaves_free() -> None:
    """Without it a constant added to all scores changes no loss; with it the best constant is unique."""
    rows = [ranked([(9, 10, 11), (9, 10, 12)], "g")]
    at = [ranked_losses(torch.tensor([1.2 + c, 0.7 + c]), rows, centring=0.0)[0] for c in (0.0, 5.0, -3.0)]
    torch.testing.assert_close(at[1], at[0])
    torch.testing.assert_close(at[2], at[0])
    fixed = {
        c: float(ranked_losses(torch.tensor([1.2 + c, 0.7 + c]), rows, centring=0.01)[0])
        for c in (-2, -1, 0, 1)
    }
    assert min(fixed, key=fixed.__getitem__) == -1  # r_w + r_l = 1.9 + 2c, nearest to 0 of these
    assert fixed[0] == pytest.approx(0.510177, abs=1e-6)


def test_fault_26_the_gradient_does_not_depend_on_how_rows_are_cut() -> None:
    rows = [ranked([(9, 10, 11 + k), (9, 10, 12, 13 + k)], f"g{k}") for k in range(4)]
    rows.append(ranked([(9, 10, k) for k in (30, 31, 32, 33)], "h"))
    found = []
    for budget in (16, 10_000):
        policy = tiny_policy()
        model = ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))
        assert (len(list(cut_rows(rows, budget))) == 1) == (budget == 10_000)
        optimizer = MasterOptimizer(model.trainable(), max_grad_norm=1e9)
        metrics = ranking_update(
            model, optimizer, rows, centring=0.01, learning_rate=0.0, token_budget=budget
        )
        found.append((metrics, optimizer.tensors()))
    (one, first), (other, second) = found
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert one["accuracy"] == pytest.approx(other["accuracy"])
    moments = [name for name in first if name.startswith("exp_avg/")]
    assert "exp_avg/score.weight" in moments
    for name in moments:
        assert (first[name] - second[name]).norm() <= 1e-5 * max(second[name].norm(), 1e-6), name


def test_a_row_is_never_cut_apart() -> None:
    rows = [ranked([(9, 10, 20 + k) for k in range(6)], "g"), ranked([(9, 10, 11), (9, 10, 12)], "h")]
    assert [len(batch) for batch in cut_rows(rows, 3)] == [1, 1]


def test_reliability_by_hand() -> None:
    """Confidences .6 (right), .6 (wrong), .9 (right): ECE = (2·|.6 − .5| + 1·|.9 − 1|)/3 = .1."""
    policy = tiny_policy()
    model = ScoredModel(policy)
    logit = [torch.logit(torch.tensor(p)) for p in (0.6, 0.4, 0.9)]
    rows = [ranked([(9, 10, 11), (9, 10, 12)], f"g{k}") for k in range(3)]
    model.sequence_scores = lambda samples: torch.stack(  # type: ignore[method-assign]
        [value for row in logit for value in (row, torch.tensor(0.0))]
    )
    metrics, table = ranking_validation(model, rows, centring=0.0, token_budget=1000)
    assert metrics["validation_ece"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["validation_accuracy"] == pytest.approx(2 / 3)
    assert [(round(p, 4), share, n) for p, share, n in table] == [(0.6, 0.5, 2), (0.9, 1.0, 1)]
    assert reliability(torch.tensor([1.0]), torch.tensor([True])) == ((1.0, 1.0, 1),)


# -- interruptions -----------------------------------------------------------------------------------------


PLACES = [
    pytest.param(reward_model, "ranking_update", 3, id="inside-the-first-epoch"),
    pytest.param(reward_model, "ranking_update", 20, id="inside-a-later-epoch"),
    pytest.param(reward_model, "ranking_validation", 4, id="validation"),
    pytest.param(reward_model, "score_statistics", 1, id="after-training"),
    pytest.param(scoring_rung, "save_scored", 1, id="after-the-export"),
]


@pytest.mark.parametrize("act", [crash, interrupt])
@pytest.mark.parametrize(("owner", "name", "call"), PLACES)
def test_a_resumed_run_is_the_quiet_run(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, act: Any
) -> None:
    file = runs.write_pairs(tmp_path / "pairs.jsonl")
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, act, after=True)
        with pytest.raises(Crash if act is crash else RunStopped):
            runs.train(runs.recipe(tmp_path, "run", "reward_model", file))
    runs.resume(tmp_path / "run")
    got, wanted = (runs.left_behind(path, "reward_model") for path in (tmp_path / "run", quiet))
    assert got == wanted


def test_after_sft_it_begins_from_the_tuned_weights_and_resumes_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = tmp_path / "talks.jsonl"
    said = [{"role": "user", "content": "ab?"}, {"role": "assistant", "content": "aa"}]
    talks.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(8)))
    file = runs.write_pairs(tmp_path / "pairs.jsonl", 60)
    extra = (
        f"sft.data={talks}",
        "sft.validation=0",
        "sft.epochs=3",
        "sft.learning_rate=1e-2",
        "reward_model.epochs=2",
    )
    calm = runs.train(runs.recipe(tmp_path, "calm", "reward_model", file, *extra))
    assert (calm / "final" / "model.safetensors").is_file()
    with monkeypatch.context() as patch:
        at_call(patch, reward_model, "ranking_update", 2, interrupt, after=True)
        with pytest.raises(RunStopped, match="reward_model step 2"):
            runs.train(runs.recipe(tmp_path, "run", "reward_model", file, *extra))
    runs.resume(tmp_path / "run")
    for section in ("reward_model", "final"):
        (one,), (other,) = ((p / section).glob("model.safetensors") for p in (tmp_path / "run", calm))
        assert one.read_bytes() == other.read_bytes()


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward_model.pairs=5", "give either reward_model.data or reward_model.pairs"),
        ("reward_model.validation=500", r"reward_model.data has 160 rows.*try reward_model.validation = 32"),
        ("reward_model.data=null", "give either"),
        ("reward_model.margin=data", "has no margin.*'data'"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, override: str, message: str) -> None:
    file = runs.write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises((ConfigError, DataError), match=message):
        runs.train(runs.recipe(tmp_path, "run", "reward_model", file, override))


def test_pairs_of_a_world_that_has_none_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    bare = runs.recipe(tmp_path, "run", "reward_model", tmp_path).model_dump(exclude_none=True)
    bare["reward_model"] |= {"pairs": 80}
    bare["reward_model"].pop("data")
    with pytest.raises(ConfigError, match="asks an environment for pairs"):
        runs.load_recipe(bare)
    bare["environment"] = {"name": "hidden_digit"}
    bare["evaluation"]["tasks"] = 5
    with pytest.raises(ConfigError, match="no preferences"):
        runs.train(runs.load_recipe(bare))


def test_inspect_shows_the_better_answer_first(tmp_path: Path) -> None:
    file = runs.write_pairs(tmp_path / "pairs.jsonl", 60)
    console = Console(record=True, width=100, file=io.StringIO())
    inspect_recipe(runs.recipe(tmp_path, "run", "reward_model", file), samples=2, console=console)
    text = console.export_text()
    assert "reward_model: 20 rows to train on, 40 held out" in text
    assert text.index("train-0  better than 1 of 1") < text.index("train-0  better than 0 of 1")
