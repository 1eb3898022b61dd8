"""The plain-text summary: what a newcomer reads at the end, safe for a terminal."""

import json
import random
import sys
from pathlib import Path

import pytest

from stepladder.errors import DataError
from stepladder.reports.summary import printable, summarise, text_table

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_run import evaluation, trajectory, write_run


def _lines(path: Path, name: str, records: list[dict]) -> None:
    path.mkdir(exist_ok=True)
    (path / "recipe.toml").write_text("")
    (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def test_everything_the_main_job_promises(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    text = summarise(path)
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["raw model"][2:] == ["1.0", "%", "0.0", "to", "3.8", "%", "100", "0.0", "%", "20.0", "s"]
    assert "46.0" in rows["after the warm start (SFT)"]
    assert "83.5" in rows["after RL"]
    assert "Sampled at temperature 1." in text
    assert "success by family" in text
    assert "two_operations" in text
    before, after = text.index("Before (raw model), task test/0"), text.index("After (after RL), task test/0")
    assert "511<|im_end|>\n  -> score 0 (terminated)" in text[before:after]
    assert '"calculate"' in text[after:]
    assert "There are 624 hens.<|im_end|>\n  -> score 1 (terminated)" in text[after:]
    assert "sft: 40 steps, rl: 60 steps" in text
    assert text.endswith(f"Report: {path / 'report.html'}\n")
    assert max(len(line) for line in text.splitlines()) <= 120


def test_a_run_that_was_killed_at_once(tmp_path: Path) -> None:
    _lines(tmp_path / "run", "metrics.jsonl", [])
    assert summarise(tmp_path / "run").startswith("No evaluation was made in this run.\n\nReport: ")


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run folder"):
        summarise(tmp_path)


def test_hostile_text_cannot_drive_the_terminal(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [evaluation("raw", 0, 0.1, 0.0, 60, rng), evaluation("rl", 9, 0.9, 1.0, 60, rng)]
    evil = "\x1b]0;owned\x07 \x1b[2J \u202e reversed \x9b31m"
    for record in records:
        record["examples"][0]["messages"][2]["raw"] = evil
        record["by_domain"]["add\x1b[1A"] = {"n": 1, "success": 1.0}
    _lines(tmp_path / "run", "evaluations.jsonl", records)
    text = summarise(tmp_path / "run")
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "\\x1b[2J" in text
    assert "\\u202e" in text


def test_printable_keeps_languages_and_lines() -> None:
    assert printable("a\n\tß 漢字 🙂 é") == "a\n\tß 漢字 🙂 é"
    assert printable("\ud800\r\x00") == "\\ud800\\r\\x00"


def test_a_long_message_is_cut_with_a_mark(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [evaluation("raw", 0, 0.1, 0.0, 60, rng), evaluation("rl", 9, 0.9, 1.0, 60, rng)]
    records[0]["examples"][0]["messages"][2]["raw"] = "word " * 1000
    _lines(tmp_path / "run", "evaluations.jsonl", records)
    assert "[... 4400 more characters]" in summarise(tmp_path / "run").replace("\n             ", " ")


def test_a_failure_and_a_missing_score_are_named(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [evaluation("raw", 0, 0.1, 0.0, 60, rng), evaluation("rl", 9, 0.9, 1.0, 60, rng)]
    broken = trajectory("test/0", "1", None, False, rng)
    broken |= {
        "failure": {"boundary": "tool", "kind": "Timeout", "message": "too slow"},
        "stop_reason": "failed",
    }
    records[1]["examples"][0] = broken
    _lines(tmp_path / "run", "evaluations.jsonl", records)
    assert "-> not scored, failed in the tool: too slow (failed)" in summarise(tmp_path / "run")


def test_text_table_aligns() -> None:
    assert (
        text_table(["", "n"], [["abc", "5"], ["d", "12345"]])
        == "         n\n--- ------\nabc      5\nd    12345"
    )


def test_a_validation_line_is_no_step(tmp_path: Path) -> None:
    """Two steps, after each of which an epoch ended and was validated; then the run was killed in step 3."""
    records = [{"step": n, "phase": "sft", key: 1.0} for n in (1, 2) for key in ("loss", "validation_loss")]
    _lines(tmp_path / "run", "metrics.jsonl", [*records, {"step": 1, "phase": "rl"}])
    assert "sft: 2 steps, rl: 1 step\n" in summarise(tmp_path / "run")


def test_every_task_that_rl_drew_is_accounted_for(tmp_path: Path) -> None:
    tasks = {"tasks_drawn": 9.0, "tasks_trained": 5.0, "tasks_discarded": 1.0, "tasks_waiting": 3.0}
    step = {"phase": "rl", "step": 1, "episodes": 12.0, "failed": 0.0}
    records = [step | {"tasks_drawn": 6.0}, step | tasks | {"step": 2, "failed": 4.0}]
    _lines(tmp_path / "run", "metrics.jsonl", records)
    said = "rl tasks: 9 drawn, 5 trained on, 1 discarded, 3 waiting; 4 of 24 episodes failed"
    assert said in summarise(tmp_path / "run")


def test_a_fit_that_ends_where_it_began_is_named(tmp_path: Path) -> None:
    """SFT found a better epoch in the end; the second round and preference optimisation did not."""
    found = [("sft", 1, 0), ("sft", 2, 2), ("rejection_sampling", 1, 1), ("rejection_sampling", 2, 1)]
    found += [("rejection_sampling", 1, 0), ("preference", 1, 0), ("preference", 2, 0)]
    records = [
        {"step": i, "phase": phase, "validation_loss": 1.0, "epoch": float(epoch), "best_epoch": float(best)}
        for i, (phase, epoch, best) in enumerate(found)
    ]
    sampled = {"step": 0, "phase": "rejection_sampling", "round": 1.0}  # as before each of its fits
    _lines(tmp_path / "run", "metrics.jsonl", [sampled, *records])
    text = summarise(tmp_path / "run")
    said = "no epoch was better; the weights are those the"
    assert f"rejection_sampling, round 2: {said} round began with\npreference: {said} rung began with" in text
    assert text.count("no epoch was better") == 2
