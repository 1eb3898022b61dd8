"""What a person reads while a run works."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console
from spine import digit_recipe

from stepladder import ladder
from stepladder.run.progress import Display


def test_after_an_evaluation_in_the_middle_the_rung_goes_on_under_its_own_name(tmp_path: Path) -> None:
    out = StringIO()
    recipe = digit_recipe(
        tmp_path, "run", "sft=null", "rl.steps=3", "rl.evaluate_every=1", "evaluation.raw=0"
    )
    ladder.train(recipe, display=Display(Console(file=out, width=200)))
    steps = [line.split("  ")[0] for line in out.getvalue().splitlines() if "left" in line]
    assert steps == ["rl 1/3", "rl 2/3", "rl 3/3"]


def test_in_a_log_a_step_is_one_line_however_narrow() -> None:
    out = StringIO()
    display = Display(Console(file=out, width=40))
    display.start("rl", 5, 0)
    metrics = {"reward": 0.5, "success": 0.5, "tool_rate": 0.9, "grad_norm": 1.0, "entropy": 0.1, "loss": 0.2}
    display.step(1, metrics)
    assert len(out.getvalue()) > 60
    assert out.getvalue().count("\n") == 1


def test_the_time_left_after_a_pause_is_that_of_the_steps(monkeypatch) -> None:
    """Two steps of 10 s, an evaluation of 100 s: the three steps left take 30 s, not 180."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = StringIO()
    display = Display(Console(file=out, width=200))
    display.start("rl", 5, 0)
    now[0] = 20.0
    display.step(2, {})
    with display.aside():
        display.start("evaluating rl-2", 8, 0, unit="tasks")
        now[0] = 120.0
    now[0] = 130.0
    display.step(3, {})
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == ["left 30s", "left 20s"]


def test_each_rung_shows_the_number_it_is_watched_by() -> None:
    """Distillation its distance to the teacher, preferences whether good answers stay likely, a validation
    its accuracy."""
    out = StringIO()
    display = Display(Console(file=out, width=200))
    display.start("distillation", 4, 0)
    display.step(1, {"loss": 0.2, "teacher_kl": 4.66371, "grad_norm": 1.4})
    display.step(2, {"validation_loss": 0.6844, "validation_accuracy": 0.75})
    display.step(3, {"nll": 0.7, "loss": 1.4, "margin": 1.25, "accuracy": 1.0, "drift_chosen": -2.106})
    display.step(4, {"margin": 1.25, "drift_desirable": 0.5})
    first, second, third, fourth = out.getvalue().splitlines()
    assert "teacher KL 4.664  grad 1.40" in first
    assert "loss 1.4000  margin 1.250  drift -2.11  acc 100%" in third
    assert "margin 1.250  drift +0.50" in fourth
    assert "val loss 0.6844  val acc 75%" in second
