"""The command line: light to start, and every mistake is one message, exit code 1 and no traceback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spine import digit_recipe, lines

from stepladder import cli
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.run.toml import to_toml
from stepladder.workbench import prepare as setup

WORLDS = Path(__file__).parent / "helpers" / "broken_worlds.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `stepladder ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["stepladder", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A small recipe as a file; its run folder is tmp_path/run."""
    recipe = digit_recipe(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe.model_dump(mode="json", exclude_none=True)))
    return str(path)


# -- how it starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import stepladder",
        "import stepladder; stepladder.Message, stepladder.load_recipe, stepladder.load_world('calculator')",
        "import sys; sys.argv = ['stepladder', '--help']; from stepladder.cli import main; main()",
        "import sys; sys.argv = ['stepladder', 'train', '--help']; from stepladder.cli import main; main()",
        "import sys; sys.argv = ['stepladder', 'recipes']; from stepladder.cli import main; main()",
    ],
)
def test_starting_loads_nothing_heavy_and_takes_no_time(code: str) -> None:
    """Faults 124: no torch; under half a second of this process's own time, which load does not change."""
    watched = (
        "import atexit, sys, time\n"
        "heavy = ('torch', 'transformers', 'peft', 'numpy.random', 'tokenizers')\n"
        "atexit.register(lambda: print('\\n', [m for m in heavy if m in sys.modules], time.process_time()))\n"
    )
    best = float("inf")
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", watched + code], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        loaded, _, seconds = done.stdout.splitlines()[-1].strip().rpartition(" ")
        assert "torch" not in loaded
        assert "transformers" not in loaded
        best = min(best, float(seconds))
    assert best < (0.5 if "load_recipe" not in code and "recipes" not in code else 1.0)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepladder", "version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl.learnig_rate=1"], ["ConfigError", "Did you mean 'learning_rate'?"]),
        (["rl.group_size=0"], ["rl.group_size", "got 0"]),
        (["environment.name=hiden_digit"], ["no environment 'hiden_digit'", "Did you mean 'hidden_digit'?"]),
        (["environment.name=nowhere.py:World"], ["nowhere.py' does not exist"]),
        (["environment.options={ digitss = 4 }"], ["no option 'digitss'", "Did you mean 'digits'?"]),
        (["environment.rewards=['nowhere:f']"], ["nowhere"]),
        (["evaluation.split=tset"], ["no split 'tset'", "Did you mean 'test'?"]),
        (["evaluation.tasks=5000"], ["1000 tasks, 5000 were asked for", "tasks = 1000"]),
        (["run.track=trackio"], ["trackio"]),
    ],
)
def test_a_wrong_setting_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str,
    overrides: list[str],
    words: list[str],
) -> None:
    if "trackio" in overrides[0]:
        monkeypatch.setitem(sys.modules, "trackio", None)  # as where it is not installed
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    assert run(monkeypatch, "train", file, *overrides) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["holds no rows", "one JSON object per line"]),
        (None, ["cannot be read"]),
        (
            '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "S"}]}\n'
            '{"mesages": 1}\n',
            ["line 2, field messages: is missing; got the columns mesages. Did you mean 'mesages'?"],
        ),
        (
            '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "S"}]}\n',
            ["has 1 conversation, sft.validation holds back 16; try sft.validation = 0"],
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str,
    content: str | None,
    words: list[str],
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    assert run(monkeypatch, "train", file, f"sft.data={data}", "sft.demonstrations=null") == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sft=null"], ["split 'train' has 0 tasks"]),
        (["sft=null", "evaluation.tasks=1"], ["0 tasks"]),
        ([], ["tasks"]),
    ],
)
def test_a_world_without_tasks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    overrides: list[str],
    words: list[str],
) -> None:
    assert run(monkeypatch, "train", file, f"environment.name={WORLDS}:Empty", *overrides) == 1
    err = capsys.readouterr().err
    assert "has 0 tasks" in err, err


def test_demonstrations_that_nobody_makes_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    world = f"environment.name={WORLDS}:Reward"
    assert run(monkeypatch, "train", file, world) == 1
    assert "no demonstrations(count, seed) method" in capsys.readouterr().err
    assert run(monkeypatch, "train", file, world, "sft=null", "evaluation.few_shot=2") == 1
    assert "evaluation.few_shot=2 needs worked examples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nothing", ["no model folder './nothing'"]),
        ("someone/unknown-model", ["smollm2-135m-instruct", "HF_HUB_OFFLINE"]),
    ],
)
def test_a_missing_model_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str,
    name: str,
    words: list[str],
) -> None:
    assert run(monkeypatch, "train", file, f"model.name={name}", "model.options=null") == 1
    err = capsys.readouterr().err
    assert "ModelNotFound" in err
    assert "use a local folder" in err
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("world", "words"),
    [("Reset", ["all 12 episodes", "the sandbox is gone"]), ("Reward", ["all 12 episodes", "no verdict"])],
)
def test_a_world_that_always_breaks_ends_the_run_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    file: str,
    world: str,
    words: list[str],
) -> None:
    settings = ["sft=null", "evaluation.raw=0", "rollout.max_tokens=100", "rollout.max_context=120"]
    assert run(monkeypatch, "train", file, f"environment.name={WORLDS}:{world}", *settings) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words), err
    assert "check-env" in err
    assert (tmp_path / "run" / "recipe.toml").is_file()


def test_a_mistake_in_the_users_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["stepladder", "train", file, f"environment.name={WORLDS}:Typo", "sft=null", "rollout.max_tokens=30"],
    )
    with pytest.raises(NameError, match="answr") as caught:
        cli.main()
    assert any("broken_worlds" in str(entry.path) for entry in caught.traceback)


def test_resuming_what_is_no_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "resume", str(tmp_path)) == 1
    assert "is no run folder" in capsys.readouterr().err


def test_a_run_that_is_there_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    short = ["rl=null", "sft.epochs=1", "evaluation.raw=0"]
    assert run(monkeypatch, "train", file, *short) == 0
    assert "solved" in capsys.readouterr().out
    assert run(monkeypatch, "train", file, *short) == 1
    assert "continue it with `stepladder resume" in capsys.readouterr().err
    assert run(monkeypatch, "train", file, *short, "--overwrite") == 0
    assert run(monkeypatch, "resume", str(tmp_path / "run")) == 0


# -- a full disk -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_disk_that_really_fills_up(tmp_path: Path) -> None:
    """A run in a file system of three megabytes: a message, exit code 1, and the old checkpoint is whole."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr}")
    try:
        recipe = digit_recipe(disk, "run", "rl.steps=2000", "run.checkpoint_every=1")
        file = tmp_path / "recipe.toml"
        file.write_text(to_toml(recipe.model_dump(mode="json", exclude_none=True)))
        done = subprocess.run(
            [sys.executable, "-m", "stepladder.cli", "train", str(file)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1, done.stderr
        assert "CheckpointError" in done.stderr
        assert "make room" in done.stderr.lower()
        assert "Traceback" not in done.stderr
        store = CheckpointStore(disk / "run" / "checkpoints")
        latest = store.latest()
        assert latest is not None
        state = store.load_state(latest)
        grown = subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], capture_output=True, text=True)
        assert grown.returncode == 0, grown.stderr
        text = (disk / "run" / "recipe.toml").read_text()
        (disk / "run" / "recipe.toml").write_text(
            text.replace("steps = 2000", f"steps = {state['state']['step'] + 2}")
        )
        again = subprocess.run(
            [sys.executable, "-m", "stepladder.cli", "resume", str(disk / "run")],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert again.returncode == 0, again.stderr
        steps = [m["step"] for m in lines(disk / "run" / "metrics.jsonl") if m["phase"] == "rl"]
        assert steps == list(range(1, state["state"]["step"] + 3))
    finally:
        subprocess.run(["umount", str(disk)], check=False)


# -- what help promises ------------------------------------------------------------------------------------


def test_the_help_of_eval_shows_overrides_that_eval_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepladder.recipe.config import eval_recipe

    assert run(monkeypatch, "eval", "--help") == 0
    shown = re.findall(r"[a-z]+\.[a-z_]+=[^\s│]+", capsys.readouterr().out)
    assert "rollout.max_turns=4" in shown
    eval_recipe({"environment": {"name": "calculator"}}, shown)  # raises on a key that it does not know
    assert run(monkeypatch, "eval", "m", "--env", "calculator", "rollout") == 1
    assert "looks like rollout.max_turns=4; got 'rollout'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--answer", "nowhere.py:read"], ["answer reader", "nowhere.py' does not exist"]),
        (["--width", "9"], ["--width 9", "--beam 36"]),
        (["--samples", "2", "--width", "9"], ["--width 9", "--beam 36"]),
    ],
)
def test_no_option_of_eval_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    assert run(monkeypatch, "eval", "./nothing", "--env", "calculator", *options) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_check_env_takes_the_options_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 3 digits the reference is below 3; `plain=false` (a TOML value, no text) gives it a tool."""
    assert run(monkeypatch, "check-env", "hidden_digit", "digits=3", "plain=false", "--tasks", "1") == 0
    assert "1 tools" in capsys.readouterr().out
    assert run(monkeypatch, "check-env", "hidden_digit", "digits=1") == 1
    assert "digits must be between 2 and 10, such as 5; got 1" in capsys.readouterr().err
    assert run(monkeypatch, "check-env", "hidden_digit", "digitss=3") == 1
    assert "no option 'digitss'. Did you mean 'digits'? It has: digits, bonus" in capsys.readouterr().err
    assert run(monkeypatch, "check-env", "hidden_digit", "digits") == 1
    assert "looks like digits=3; got 'digits'" in capsys.readouterr().err
