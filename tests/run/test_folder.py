"""The run folder: strict lines, one writer, and logs that match the checkpoint after any kill."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.atomic import _sibling
from stepladder.errors import CheckpointError, ConfigError, DataError, InvariantError
from stepladder.planning import measured
from stepladder.reports import write
from stepladder.reports.run import read_jsonl, read_run
from stepladder.run import folder as run_folder
from stepladder.run import training_files as rows
from stepladder.run.files import is_written
from stepladder.run.folder import RunFolder, model_folder
from stepladder.run.provenance import cpu_model, git_state
from stepladder.rungs.preference import reference_logprobs
from stepladder.rungs.rejection_sampling import rung as rejection_sampling
from stepladder.rungs.reward_model import step_data
from stepladder.rungs.rl import rung as rl_rung
from stepladder.types import Message, Score, Task, Trajectory

RECIPE = {"seed": 0, "model": {"name": "x", "lora": None}}
SAMPLING = {**RECIPE, "rejection_sampling": {"tasks": 4}, "rl": {"steps": 1}}


def _trajectory(name: str) -> Trajectory:
    return Trajectory(name, "g", Task("t"), (), (Message("user", "hi"),), (), Score(1.0), "terminated")


def test_create_writes_recipe_and_environment(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE, device="cpu") as run:
        assert run.recipe() == {"seed": 0, "model": {"name": "x"}}
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["packages"]["torch"]
        assert environment["device"] == "cpu"
        assert environment["threads"] >= 1
        assert run.checkpoints.is_dir()


def test_an_existing_run_is_not_touched(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0})
    with pytest.raises(
        ConfigError,
        match=r"exists; continue it with `stepladder resume .*--overwrite \(from Python: overwrite=True\)",
    ):
        RunFolder.create(tmp_path / "run", RECIPE)
    with RunFolder.open(tmp_path / "run") as run:
        assert run.metrics() == [{"step": 0}]


def test_overwrite_deletes_a_run_and_only_a_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0})
        (run.final / "sub").mkdir(parents=True)
    with RunFolder.create(tmp_path / "run", {"seed": 1}, overwrite=True) as run:
        assert run.metrics() == []
        assert run.recipe() == {"seed": 1}
        assert not run.final.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is no run folder"):
        RunFolder.create(tmp_path / "thesis", RECIPE, overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.txt").exists()


def test_overwrite_refuses_a_project_that_has_a_recipe(tmp_path: Path) -> None:
    """A folder of the user's with a recipe.toml in it, and a run with the user's own files beside it."""
    project, run = tmp_path / "project", tmp_path / "run"
    (project / "src").mkdir(parents=True)
    (project / "thesis.tex").write_text("years of work")
    (project / "recipe.toml").write_text("[run]")
    with pytest.raises(ConfigError, match=r"is no run folder \(no environment\.json\).*run\.name"):
        RunFolder.check_new(project, overwrite=True)
    RunFolder.create(run, RECIPE).close()
    for i in range(7):
        (run / f"own{i}").write_text("")
    with pytest.raises(ConfigError, match=r"holds what no run writes: own0, .*own4 and 2 more; .*Move it"):
        RunFolder.create(run, RECIPE, overwrite=True)
    assert len(list(run.glob("own*"))) == 7
    for path in run.glob("own*"):
        path.unlink()
    for own in ("trajectories/mine.txt", "trajectories/mine.jsonl", "checkpoints/notes"):
        (run / own).write_text("")
        with pytest.raises(ConfigError, match=f"holds what no run writes: {own}"):
            RunFolder.create(run, RECIPE, overwrite=True)
        (run / own).unlink()
    RunFolder.create(run, RECIPE, overwrite=True).close()


def test_a_deletion_that_was_killed_is_still_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next --overwrite would take what is left for somebody's project."""
    path = tmp_path / "run"
    with RunFolder.create(path, RECIPE) as run:
        run.log({"step": 0})
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "describe_environment", _killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.create(path, RECIPE, overwrite=True)
    assert not (path / "metrics.jsonl").exists()
    RunFolder.create(path, RECIPE, overwrite=True).close()


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_every_name_that_a_run_writes_is_known() -> None:
    names = [step_data.STEPS_FILE, reference_logprobs.FILE, rejection_sampling.START, rl_rung.REFERENCE]
    names += [measured.FILE, write.REPORT, write.SUMMARY, rows.ACCEPTED, rows.PAIRS, "wandb", "tensorboard"]
    names += ["reference-40.safetensors", "checkpoints", "final", "reward_model", "process_reward_model"]
    names += [f".recipe.toml.{os.getpid()}.new", ".report.html.new", _sibling(Path("final"), "tmp").name]
    assert [name for name in names if not is_written(name)] == []
    assert not is_written("reference-notes.txt")
    assert not is_written("trajectories.jsonl")


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no recipe\.toml"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.create(tmp_path / "file", RECIPE)
    with pytest.raises(DataError, match="is no run folder"):
        read_run(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be made: .*run\.out"):
        RunFolder.create(tmp_path / "file" / "run", RECIPE)


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", RECIPE).close()
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    (tmp_path / "run" / ".lock").mkdir()  # root may write anywhere, but not into a folder
    with pytest.raises(ConfigError, match=r"cannot be written: .*copy it"):
        RunFolder.open(tmp_path / "run")


def test_two_writers_are_refused_also_across_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from stepladder.errors import ConfigError\n"
        "from stepladder.run.folder import RunFolder\n"
        "try: RunFolder.open(Path(sys.argv[1]))\nexcept ConfigError as e: print(e)\nelse: print('opened')\n"
    )

    def other() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
        )
        return done.stdout

    with RunFolder.create(tmp_path / "run", RECIPE):
        assert "is in use by another process" in other()
        with pytest.raises(ConfigError, match="is in use"):
            RunFolder.create(tmp_path / "run", RECIPE, overwrite=True)
    assert other() == "opened\n"


def test_lines_are_strict_json(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0, "loss": float("nan"), "bad": float("inf")})
        text = (run.path / "metrics.jsonl").read_text()  # there before anything is closed
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 0, "loss": None, "bad": None}


def test_resume_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.create(path, SAMPLING) as run:
        run.log({"step": 0})
        run.log_trajectories([_trajectory("a")], step=0, phase="rl")
        cursor = json.loads(json.dumps(run.cursor()))
        run.log({"step": 1})
        run.log_evaluation({"rung": "rl", "success": 1.0})
        run.log_trajectories([_trajectory("b")], step=1, phase="rl")
        run.log_trajectories([_trajectory("c")], step=1, phase="accepted")
        run.log_rows("accepted.jsonl", [{"task": "t"}])
    with RunFolder.open(path) as run:
        run.cut_back(cursor)
        assert run.metrics() == [{"step": 0}]
        assert run.evaluations() == []
        run.log({"step": 1})
        assert run.metrics() == [{"step": 0}, {"step": 1}]
    assert [t["id"] for t in read_jsonl(path / "trajectories" / "rl.jsonl")] == ["a"]
    assert not (path / "trajectories" / "accepted.jsonl").exists()
    assert not (path / "accepted.jsonl").exists()


def test_what_the_user_put_into_the_folder_stays(tmp_path: Path) -> None:
    """An evaluation, a sample of `stepladder sample`, a file without a last newline: none is the run's."""
    path = tmp_path / "run"
    own = ["answers.jsonl", "accepted.jsonl", "pairs.jsonl", "trajectories.jsonl", "trajectories/mine.jsonl"]
    with RunFolder.create(path, RECIPE) as run:
        run.log({"step": 0})
        cursor = run.cursor()
    for name in own:
        (path / name).write_text('{"a": 1}\n{"b": 2}')
    with RunFolder.open(path) as run:
        assert set(run.cursor()) == {"metrics.jsonl"}
        run.cut_back(cursor)
        run.cut_back({"answers.jsonl": 3, **cursor})  # as checkpoints once had it
        run.cut_back({})
    assert not (path / "metrics.jsonl").exists()
    assert all((path / name).read_text() == '{"a": 1}\n{"b": 2}' for name in own)


def test_a_log_that_would_not_be_cut_back_is_refused(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        with pytest.raises(InvariantError, match=r"'accepted\.jsonl' is no log of this run"):
            run.log_rows("accepted.jsonl", [{"task": "t"}])
        with pytest.raises(InvariantError, match=r"trajectories/rl\.jsonl"):
            run.log_trajectories([_trajectory("a")], step=0, phase="rl")


def test_killed_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0})
        run.cut_back({})
        run.log({"step": 0, "again": True})
        assert run.metrics() == [{"step": 0, "again": True}]


def test_a_log_shorter_than_the_checkpoint_says_is_reported(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0})
        cursor = run.cursor()
        (run.path / "metrics.jsonl").write_text("")
        with pytest.warns(RuntimeWarning, match="lines of it were lost"):
            run.cut_back(cursor)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200))
def test_a_torn_last_line_is_left_out_and_overwritten(tmp_path_factory: Any, size: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "run"
    with RunFolder.create(path, RECIPE) as run:
        for step in range(5):
            run.log({"step": step, "text": "\n"})
    log = path / "metrics.jsonl"
    os.truncate(log, min(size, log.stat().st_size))
    whole = log.read_bytes().count(b"\n")
    assert [record["step"] for record in read_run(path).metrics] == list(range(whole))
    with RunFolder.open(path) as run:
        run.log({"step": 99})
        assert [record["step"] for record in run.metrics()] == [*range(whole), 99]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read_jsonl(tmp_path / "x.jsonl")


def test_every_logged_line_survives_kill_9(tmp_path: Path) -> None:
    """The child prints a step after it logged it; whatever was printed must be in the file."""
    code = (
        "import sys; from pathlib import Path\n"
        "from stepladder.run.folder import RunFolder\n"
        "run = RunFolder.create(Path(sys.argv[1]), {'seed': 0})\n"
        "for step in range(10**9):\n"
        "    run.log({'step': step, 'pad': 'x' * 500})\n"
        "    print(step, flush=True)\n"
    )
    path = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(200):
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
    child.wait()
    child.stdout.close()
    with RunFolder.open(path) as run:  # and the lock of the dead is free
        steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(len(steps)))
    assert len(steps) > last


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        run.log({"step": 0})

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("stepladder.run.folder._write_all", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*MB free.*stepladder resume"):
            run.log({"step": 1})
        assert run.metrics() == [{"step": 0}]


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "x").write_text("1")
    subprocess.run([*git, "add", "x"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["changed"] is False
    (tmp_path / "x").write_text("2")
    assert git_state(tmp_path) == {**state, "changed": True}


def test_cpu_model(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "missing")


def test_a_run_that_is_not_there_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe `distill` names runs/calculator as its teacher, before anybody has trained it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run runs/calculator in .*`stepladder train calculator`"):
        model_folder("runs/calculator")
    with pytest.raises(ConfigError, match=r"no run runs/mine in .*`stepladder train RECIPE`"):
        model_folder("runs/mine")
    assert model_folder("org/model") == "org/model"


def test_a_recipe_that_was_written_over_is_named(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        (run.path / "recipe.toml").write_text('{"rung": "eval"}')
        with pytest.raises(ConfigError, match=r"recipe\.toml is no TOML.*put back the recipe"):
            run.recipe()


@pytest.mark.parametrize("scores", ["reward_model", "process_reward_model"])
def test_a_run_of_scores_alone_says_how_to_use_it(tmp_path: Path, scores: str) -> None:
    with RunFolder.create(tmp_path / "run", RECIPE) as run:
        (run.path / scores).mkdir()
    with pytest.raises(ConfigError, match=rf"no policy; .*rewards = \[.{scores}:.*run/{scores}.\]"):
        model_folder(str(tmp_path / "run"))
    (tmp_path / "run" / scores).rmdir()
    with pytest.raises(ConfigError, match="has not finished"):
        model_folder(str(tmp_path / "run"))


def test_a_run_that_goes_on_after_its_scores_has_not_finished(tmp_path: Path) -> None:
    """Reward models come before rl: stopped in between, a run has scores and no final model yet."""
    with RunFolder.create(tmp_path / "run", SAMPLING) as run:
        (run.path / "reward_model").mkdir()
    with pytest.raises(ConfigError, match=r"has not finished.*stepladder resume"):
        model_folder(str(tmp_path / "run"))
