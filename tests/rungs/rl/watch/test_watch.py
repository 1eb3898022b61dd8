"""What a run does about its alarms, and that their memory survives a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from spine import digit_recipe, tiny_policy

from stepladder.diagnostics.alarm import Alarm, Change, Detector
from stepladder.diagnostics.monitor import Monitor
from stepladder.errors import RunStopped
from stepladder.ladder import resume, train
from stepladder.recipe.rl import RlSection
from stepladder.run.progress import Display
from stepladder.rungs.rl.watch import watch as watching
from stepladder.rungs.rl.watch.cross_scores import prompt_information
from stepladder.rungs.rl.watch.remedy import present, remedied
from stepladder.types import Group, Sampling, Score, Task, TrainingSample, Trajectory, Turn


class AtStepTwo(Detector):
    """An alarm that needs no reason."""

    name = "at_step_two"

    def see(self, step: int, metrics: Any) -> Alarm | None:
        self.held += 1
        if step < 2:
            return None
        cure = (Change("learning_rate", "times", 0.5), Change("clip.high", "at_least", 0.28))
        return Alarm(self.name, step, {"seen": float(self.held)}, "it is step two", "go slower", cure)


def recipe(out: Path, *overrides: str) -> Any:
    few = (
        "sft.demonstrations=16",
        "sft.validation=0",
        "evaluation.raw=0",
        "evaluation.tasks=2",
        "rl.steps=4",
    )
    kept = ("run.exact=true", "run.checkpoint_every=1", "run.keep_checkpoints=9")
    return digit_recipe(out, "run", *few, "rl.warmup_steps=0", *kept, *overrides)


@pytest.fixture(autouse=True)
def alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "Monitor", lambda alarms: Monitor([AtStepTwo()]))


def back_to_step_two(folder: Path) -> None:
    """Remove the checkpoints of the last two of the four RL steps."""
    checkpoints = sorted((folder / "checkpoints").iterdir())
    assert len(checkpoints) >= 4
    for later in checkpoints[-2:]:
        shutil.rmtree(later)


def rates(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["learning_rate"] for r in records if r["phase"] == "rl"]


def alarms(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]


def test_warn_tells_everywhere_and_changes_nothing(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    folder = train(recipe(tmp_path), display=Display(console))
    assert [a["step"] for a in alarms(folder)] == [2, 3, 4]
    assert alarms(folder)[0]["changed"] == {}
    assert rates(folder) == [3e-3] * 4
    text = console.export_text()
    assert "ALARM at_step_two at step 2: it is step two (seen 2). Advice: go slower" in text
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["alarms"] for r in records if r["phase"] == "rl"] == [0.0, 1.0, 1.0, 1.0]
    assert "at_step_two at step 2" in (folder / "summary.txt").read_text()
    assert "it is step two" in (folder / "report.html").read_text()


def test_remedy_is_applied_once_and_kept_by_a_resumed_run(tmp_path: Path) -> None:
    """GRPO clips at .2 of its own; the remedy asks for .28 at least, and half the rate. Once, not each "
    "time."""
    console = Console(record=True, width=200)
    folder = train(recipe(tmp_path, "rl.on_alarm=remedy"), display=Display(console))
    assert rates(folder) == [3e-3, 3e-3, 1.5e-3, 1.5e-3]
    first, *rest = alarms(folder)
    assert first["changed"] == {"learning_rate": [3e-3, 1.5e-3], "clip.high": [0.2, 0.28]}
    assert [a["changed"] for a in rest] == [{}, {}]
    assert "rl.learning_rate: 0.003 -> 0.0015" in console.export_text()
    whole = (folder / "metrics.jsonl").read_text()
    back_to_step_two(folder)  # at which the remedy was applied
    resume(folder, display=Display(quiet=True))
    assert rates(folder) == [3e-3, 3e-3, 1.5e-3, 1.5e-3]
    assert [a["evidence"]["seen"] for a in alarms(folder)] == [2.0, 3.0, 4.0]
    assert len(whole.splitlines()) == len((folder / "metrics.jsonl").read_text().splitlines())


def test_a_resumed_run_follows_its_edited_recipe_and_keeps_its_remedies(tmp_path: Path) -> None:
    """The checkpoint remembers what the remedy changed, not the recipe that it changed."""
    folder = train(recipe(tmp_path, "rl.on_alarm=remedy"), display=Display(quiet=True))
    back_to_step_two(folder)
    text = (folder / "recipe.toml").read_text()
    assert "\nsteps = 4\n" in text
    (folder / "recipe.toml").write_text(text.replace("\nsteps = 4\n", "\nsteps = 3\n"))
    resume(folder, display=Display(quiet=True))
    assert rates(folder) == [3e-3, 3e-3, 1.5e-3]


def test_stop_saves_and_names_the_alarm(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"rl.on_alarm = 'stop'.*at_step_two at step 2.*stepladder resume"):
        train(recipe(tmp_path, "rl.on_alarm=stop", "run.checkpoint_every=100"), display=Display(quiet=True))
    folder = tmp_path / "run"
    assert len(rates(folder)) == 2
    assert (folder / "report.html").is_file()
    with pytest.raises(RunStopped, match="at step 3"):  # asked to go on, it goes on from what was saved
        resume(folder, display=Display(quiet=True))
    assert len(rates(folder)) == 3


# -- remedies on recipes -----------------------------------------------------------------------------------


def test_changes_that_mean_nothing_to_the_algorithm_are_left_out() -> None:
    settings = RlSection(algorithm="reinforce", kl={"coefficient": 0.0}, learning_rate=1e-4)
    cure = (
        Change("clip.high", "at_least", 0.28),
        Change("credit.scale", "set", "none"),
        Change("kl.coefficient", "set", 0.0),
        Change("learning_rate", "times", 0.5),
    )
    after, taken = remedied(settings, cure)
    assert taken == {"learning_rate": [1e-4, 5e-5]}
    assert after.row() == settings.row()


def test_the_algorithms_own_values_are_what_is_changed() -> None:
    settings = RlSection(algorithm="grpo")
    assert present(settings, "kl.coefficient") == 0.04
    after, taken = remedied(
        settings, (Change("kl.coefficient", "set", 0.0), Change("credit.scale", "set", "none"))
    )
    assert taken == {"kl.coefficient": [0.04, 0.0], "credit.scale": ["group_std", "none"]}
    assert after.row().kl_in == "none"


@pytest.mark.parametrize(
    ("written", "gone"),
    [
        ({"place": "loss"}, {"kl.place": ["loss", None]}),
        ({"estimator": "k2"}, {"kl.estimator": ["k2", None]}),
        ({"reference_every": 5}, {"kl.reference_every": [5, 0]}),
        ({"place": "reward", "target": 3.0}, {"kl.place": ["reward", None], "kl.target": [3.0, None]}),
    ],
)
def test_a_recipe_that_says_more_of_its_kl_term_loses_it_all_the_same(
    written: dict[str, Any], gone: dict[str, Any]
) -> None:
    settings = RlSection(algorithm="grpo", kl={"coefficient": 0.04, **written})
    after, taken = remedied(settings, (Change("kl.coefficient", "set", 0.0),))
    assert taken == {**gone, "kl.coefficient": [0.04, 0.0]}
    assert after.row().kl_in == "none"


def test_an_entropy_target_takes_the_place_of_a_fixed_bonus() -> None:
    settings = RlSection(algorithm="dr_grpo", entropy={"coefficient": 0.01})
    after, taken = remedied(settings, (Change("entropy.target", "set", 0.5),))
    assert taken == {"entropy.coefficient": [0.01, 0.0], "entropy.target": [None, 0.5]}
    assert after.entropy.target == 0.5


def test_gspo_keeps_its_clip() -> None:
    """Its ratio is a geometric mean over tokens, clipped at 4e-4: .28 would be no clip at all."""
    after, taken = remedied(RlSection(algorithm="gspo"), (Change("clip.high", "at_least", 0.28),))
    assert taken == {}
    assert after.row().clip_high == 4e-4


# -- cross scores ------------------------------------------------------------------------------------------


def _group(name: str, prompt: tuple[int, ...], said: tuple[int, ...]) -> Group:
    turn = Turn(prompt, said, (-1.0,) * len(said), Sampling(), ((0, len(said)),), "stop")
    ids = prompt + said
    mask = tuple(i >= len(prompt) for i in range(len(ids)))
    sample = TrainingSample(ids, mask, (0.0,) * len(ids), name, tuple(0 if m else -1 for m in mask), name)
    member = Trajectory(
        name, name, Task(name), (turn,), (), (0.0,), Score(0.0), "terminated", samples=(sample,)
    )
    return Group(name, Task(name), (member, member))


def test_cross_scores_are_the_policys_own(tmp_path: Path) -> None:
    """Against the matrix made one by one, and NaN where too few prompts differ."""
    import math

    import torch
    from spine import alone, sample

    policy = tiny_policy()
    prompts = [(9, 10 + k, 12) for k in range(3)]
    said = [(20 + k, 21, 22) for k in range(3)]
    groups = [_group(f"g{k}", prompts[k], said[k]) for k in range(3)]
    got = prompt_information(policy, groups, temperature=0.7, each=1)
    with torch.no_grad():
        matrix = [[float(alone(policy, sample(p + z, 3), 0.7).sum()) for p in prompts] for z in said]
    mean = [math.log(sum(math.exp(x) for x in row) / 3) for row in matrix]
    wanted = sum(matrix[k][k] - mean[k] for k in range(3)) / 3 / math.log(3)
    assert got == pytest.approx(max(0.0, wanted), abs=1e-5)
    assert math.isnan(prompt_information(policy, groups[:2], temperature=1.0))


def test_a_falling_dependence_on_the_prompt_is_looked_at_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured at steps 1 and 6: .4, then .2 < .75 * .4, so in each step until it is .35 again, and at 11."""
    values = iter([0.4, 0.2, 0.25, 0.35, 0.4])
    monkeypatch.setattr(watching, "prompt_information", lambda *args, **options: next(values))
    folder = train(recipe(tmp_path, "rl.steps=11"), display=Display(quiet=True))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = {r["step"]: r.get("prompt_information") for r in records if r["phase"] == "rl"}
    measured = {step: value for step, value in seen.items() if value is not None}
    assert measured == {1: 0.4, 6: 0.2, 7: 0.25, 8: 0.35, 11: 0.4}
