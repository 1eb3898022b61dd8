"""What became of a file's rows is said, and noted, by every rung that learns from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scoring_runs as runs
from spine import sample

from stepladder.data.budget import Tally, limit_tokens
from stepladder.errors import CheckpointError, DataError, TemplateError
from stepladder.rungs.preference.data import judged_data, preference_rows
from stepladder.rungs.registry import prepare_run
from stepladder.rungs.reward_model.ranking_data import ranked_data
from stepladder.rungs.reward_model.scoring_files import Report
from stepladder.rungs.reward_model.step_data import step_data

PAIRS = [{"prompt": f"{a}?", "chosen": "a", "rejected": "b", "source": "me"} for a in "abcdef"]
STEPS = [{"prompt": f"{a}?", "steps": ["a", "b"], "labels": [1, 0], "source": "me"} for a in "abcdef"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def into(said: list[str]) -> Report:
    return lambda text, _: said.append(text)


SHORT = ("epochs=1", "validation=2", "batch_size=4")


def recipe(section: str, file: Path, *overrides: str) -> Any:
    given = (f"{section}.{o}" for o in (*SHORT, *overrides))
    return runs.recipe(file.parent, "run", section, file, *given)


@pytest.mark.parametrize(
    ("section", "rows"),
    [("reward_model", PAIRS), ("process_reward_model", STEPS), ("preference", PAIRS), ("sft", PAIRS)],
)
def test_each_rung_notes_format_oddities_repetitions_and_counts(
    tmp_path: Path, section: str, rows: list[dict[str, Any]]
) -> None:
    run = runs.train(recipe(section, write(tmp_path / "a.jsonl", [*rows, rows[0]])))
    text = json.loads((run / "data.json").read_text())[section]["text"]
    assert text.startswith("a.jsonl: 7 ")
    for part in ("ignored source", "1 repeated row left out", "6 rows: 6 kept"):
        assert part in text


def test_a_reward_model_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIRS)
    run = runs.train(recipe("reward_model", file))
    write(file, [*PAIRS[1:], PAIRS[0] | {"chosen": "f"}])
    for checkpoint in (run / "checkpoints").iterdir():
        for inside in checkpoint.iterdir():
            inside.unlink()
        checkpoint.rmdir()
    with pytest.raises(CheckpointError, match="the data of the rung 'reward_model' changed"):
        runs.resume(run)


def test_rankings_in_order_alone_are_rankings_for_a_reward_model(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}?", "completions": ["a", "b", "c"]} for a in "abcdef"]
    rows[0]["scores"] = [1, 1, 1]
    made = recipe("reward_model", write(tmp_path / "a.jsonl", rows[1:]))
    said: list[str] = []
    train, held = ranked_data(prepare_run(made), made.reward_model, seed=0, report=into(said))
    assert [len(row.better) for row in (*train, *held)] == [3] * 5
    assert "order taken as best first in 5" in said[0]


def test_a_ranking_of_equals_is_counted_as_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}?", "completions": ["a", "b"], "scores": [1, int(a == "c")]} for a in "abcdef"]
    made = recipe("reward_model", write(tmp_path / "a.jsonl", rows))
    said: list[str] = []
    train, held = ranked_data(prepare_run(made), made.reward_model, seed=0, report=into(said))
    assert len(train) + len(held) == 5
    assert "1 dropped (all completions equally good: 1)" in said[0]


def test_a_solution_without_labels_is_named_by_its_row(tmp_path: Path) -> None:
    rows = [*STEPS, {"prompt": "f?", "steps": ["a"]}]
    with pytest.raises(DataError, match="row 7 has 0 labels"):
        prepare_run(recipe("process_reward_model", write(tmp_path / "a.jsonl", rows)))


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of the three encoders of judged rows."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TemplateError("no")

    for encoder in (
        "preference.data.preference_samples",
        "reward_model.ranking_data.preference_samples",
        "reward_model.step_data.step_samples",
    ):
        monkeypatch.setattr(f"stepladder.rungs.{encoder}", refuse)
    pairs, steps = write(tmp_path / "a.jsonl", PAIRS), write(tmp_path / "b.jsonl", STEPS)
    with pytest.raises(TemplateError, match=r"the conversation that begins '.\?': no"):
        runs.train(recipe("preference", pairs))
    made = recipe("reward_model", pairs)
    with pytest.raises(TemplateError, match="that begins"):
        ranked_data(prepare_run(made), made.reward_model, seed=0, report=lambda *_: None)
    made = recipe("process_reward_model", steps)
    with pytest.raises(TemplateError, match="that begins"):
        step_data(prepare_run(made), made.process_reward_model, tmp_path, seed=0, report=lambda *_: None)


def kto(tmp_path: Path, *overrides: str) -> Any:
    return recipe("preference", write(tmp_path / "a.jsonl", PAIRS), 'loss="kto"', *overrides)


def test_held_out_answers_of_one_prompt_are_refused_by_the_key_to_change(tmp_path: Path) -> None:
    made = kto(tmp_path)
    bench = prepare_run(made)
    rows, held = preference_rows(bench, made.preference, tmp_path, seed=0)
    with pytest.raises(DataError, match=r"2 held-out answers belong to one.*preference.validation = 8"):
        judged_data(bench, rows, held, made.preference, seed=0)


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_that_has_one_prompt_by_chance_is_joined_to_another(tmp_path: Path, seed: int) -> None:
    made = kto(tmp_path, "validation=0", "batch_size=2")
    bench = prepare_run(made)
    rows, _ = preference_rows(bench, made.preference, tmp_path, seed=seed)
    data, _ = judged_data(bench, rows, [], made.preference, seed=seed)
    assert sorted(i for batch in data.fixed for i in batch) == list(range(12))
    assert all(len({rows[i].prompt for i in batch}) > 1 for batch in data.fixed)


TOO_LONG = (
    r"of 6 rows are longer than the 128 tokens that the model has positions for .* the longest \d+ tokens; "
)
LONG = "abcdef" * 30


@pytest.mark.parametrize(
    ("section", "rows", "said"),
    [
        (
            "sft",
            [PAIRS[0] | {"chosen": LONG}, *PAIRS[1:]],
            "1 " + TOO_LONG + "leave them out with sft.max_tokens = 128",
        ),
        (
            "preference",
            [PAIRS[0] | {"rejected": LONG}, *PAIRS[1:]],
            "1 " + TOO_LONG + ".* add up to at most 128",
        ),
        (
            "reward_model",
            [*PAIRS[:4], *({"prompt": LONG + p, "chosen": "a", "rejected": "b"} for p in "xy")],
            "2 " + TOO_LONG + "cut or drop them: reward_model.max_prompt_tokens",
        ),
        ("process_reward_model", [STEPS[0] | {"steps": ["a", LONG]}, *STEPS[1:]], "1 " + TOO_LONG),
    ],
)
def test_rows_longer_than_the_model_are_refused_before_training(
    tmp_path: Path, section: str, rows: list[dict[str, Any]], said: str
) -> None:
    made = recipe(section, write(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=said):
        runs.train(made)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_mend_that_is_named_for_long_rows_works(tmp_path: Path) -> None:
    rows = [PAIRS[0] | {"chosen": LONG}, *PAIRS[1:]]
    run = runs.train(recipe("sft", write(tmp_path / "a.jsonl", rows), "max_tokens=128"))
    assert "5 kept, 1 dropped (over max_tokens=128: 1)" in (run / "data.json").read_text()


def test_a_mismatched_answer_of_kto_may_be_too_long_where_no_row_is(tmp_path: Path) -> None:
    """The longest prompt fits its own answer and the longest answer its own prompt, but not each other."""
    rows = [
        {"prompt": "abcdef" * 13 + "?", "completion": "a", "label": True},
        {"prompt": "b?", "completion": "abcdef" * 13, "label": False},
    ]
    made = recipe("preference", write(tmp_path / "a.jsonl", rows), "loss=kto", "validation=0", "batch_size=2")
    with pytest.raises(DataError, match="1 of 2 rows are longer than the 128 tokens"):
        runs.train(made)


def test_answers_beyond_the_limit_are_counted() -> None:
    """A template that rewrites earlier turns makes a sample of each answer; the second begins at token 6."""
    first, second = sample((1, 2, 3, 4), 2), sample((1, 2, 5, 6, 7, 8, 9), 6)
    kept = limit_tokens([first, second], 5, "cut")
    assert isinstance(kept, list)
    assert [f.sample for f in kept] == [first]
    tally = Tally()
    tally.keep(kept, left_out=1)
    assert tally.text == "1 row: 1 kept, 1 answer beyond the limit left out"
