"""A whole run in small: what it leaves behind, and that no interruption shows in it afterwards."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from interruptions import Crash, at_call, crash, interrupt
from rich.console import Console
from spine import assert_same, digit_recipe, lines, outcome

from stepladder import ladder
from stepladder.errors import CheckpointError, ConfigError, EnvironmentFault, RunStopped
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.policies.pretrained import load_model
from stepladder.recipe.config import Recipe
from stepladder.run import folder as run_folder
from stepladder.run.progress import Display
from stepladder.rungs import fitting, reference
from stepladder.rungs.rl import loop as rl
from stepladder.workbench.bench import Workbench

# Everything that a state has to remember: a reference, domains, two updates a batch, evaluations between.
FULL = (
    "rl.kl.coefficient=0.01",
    "rl.tasks.sampling=adaptive",
    "rl.updates_per_batch=2",
    "rl.evaluate_every=2",
)


def train(recipe: Recipe, **options: Any) -> Path:
    return ladder.train(recipe, display=Display(quiet=True), **options)


def resume(path: Path) -> Path:
    return ladder.resume(path, display=Display(quiet=True))


@pytest.fixture(autouse=True)
def _checkpoint_after_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    return train(digit_recipe(tmp_path_factory.mktemp("quiet"), "run", *FULL))


# -- what a run leaves behind ------------------------------------------------------------------------------


def test_a_run_fills_its_folder(quiet: Path) -> None:
    names = {p.name for p in quiet.iterdir()}
    wanted = {"recipe.toml", "environment.json", "metrics.jsonl", "evaluations.jsonl", "trajectories"}
    assert wanted | {"checkpoints", "final", "report.html", "summary.txt"} <= names
    assert not [name for name in names if name.endswith(".new")]
    metrics = lines(quiet / "metrics.jsonl")
    steps = [m["step"] for m in metrics if m["phase"] == "rl"]
    assert steps == [1, 2, 3, 4, 5]
    trained = [m["step"] for m in metrics if m["phase"] == "sft" and "loss" in m]
    assert trained == list(range(1, len(trained) + 1))
    rungs = [e["rung"] for e in lines(quiet / "evaluations.jsonl")]
    assert rungs == ["raw", "sft", "rl-2", "rl-4", "rl"]
    assert {e["n"] for e in lines(quiet / "evaluations.jsonl")} == {6, 12}
    played = lines(quiet / "trajectories" / "rl.jsonl")
    assert len(played) == 5 * 3 * 4
    assert [t["step"] for t in played] == sorted(t["step"] for t in played)
    assert len(CheckpointStore(quiet / "checkpoints").steps()) == 2


def test_the_weights_really_moved_on_each_rung(quiet: Path) -> None:
    metrics = lines(quiet / "metrics.jsonl")
    losses = [m["validation_loss"] for m in metrics if "validation_loss" in m]
    assert losses[-1] < losses[0]
    assert any(m.get("updated") == 1.0 and m["grad_norm"] > 0 for m in metrics if m["phase"] == "rl")


def test_sampled_tokens_name_the_weights_that_sampled_them(quiet: Path) -> None:
    """Version 0 is the raw model, 1 the fine-tuned one; each RL step samples from its own."""
    versions: dict[int, set[int]] = {}
    for t in lines(quiet / "trajectories" / "rl.jsonl"):
        for turn in t["turns"]:
            versions.setdefault(t["step"], set()).update(v for v, _ in turn["versions"])
    assert versions == {step: {step} for step in range(1, 6)}


def test_the_resolved_recipe_runs_again_to_the_same_end(quiet: Path, tmp_path: Path) -> None:
    data = tomllib.loads((quiet / "recipe.toml").read_text())
    data["run"]["out"] = str(tmp_path)
    assert_same(train(Recipe.model_validate(data)), quiet)


def test_another_seed_is_another_run(tmp_path: Path, quiet: Path) -> None:
    other = train(digit_recipe(tmp_path, "run", *FULL, "run.seed=1"))
    assert outcome(other)["weights"] != outcome(quiet)["weights"]
    assert outcome(other)["trajectories"] != outcome(quiet)["trajectories"]


def test_the_final_model_opens_elsewhere(quiet: Path) -> None:
    model, tokenizer = load_model(quiet / "final")
    assert tokenizer.chat_template
    assert model.config.vocab_size == len(tokenizer)


def test_resuming_a_finished_run_changes_nothing(quiet: Path, tmp_path: Path) -> None:
    path = train(digit_recipe(tmp_path, "run", *FULL))
    resume(path)
    assert_same(path, quiet)


def test_a_folder_that_is_there_is_refused_before_the_model_is_loaded(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    monkeypatch.setattr(ladder, "prepare_run", lambda recipe: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match="exists"):
        train(recipe)
    with pytest.raises(ConfigError, match="will not delete it"):
        train(recipe, overwrite=True)


def test_what_a_kill_left_before_the_recipe_was_written_is_in_nobodys_way(
    recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "environment.json").write_text("{")
    train(recipe.model_copy(update={"rl": None}))
    assert json.loads((tmp_path / "run" / "environment.json").read_text())


# -- interruptions -----------------------------------------------------------------------------------------


PLACES = [
    pytest.param(ladder, "evaluate", 1, False, id="raw-evaluation"),
    pytest.param(fitting, "sft_update", 3, True, id="inside-an-epoch"),
    pytest.param(fitting, "validation_loss", 3, True, id="validation"),
    pytest.param(ladder, "save_tensors", 2, False, id="sft-checkpoint"),
    pytest.param(CheckpointStore, "save", 3, True, id="after-the-last-epoch"),
    pytest.param(CheckpointStore, "save", 4, True, id="after-sft"),
    pytest.param(ladder, "evaluate", 2, True, id="evaluation-after-sft"),
    pytest.param(Workbench, "play", 2, False, id="rollout"),
    pytest.param(rl, "rl_update", 3, True, id="between-two-updates-of-a-batch"),
    pytest.param(rl, "make_batch", 4, False, id="batch"),
    pytest.param(run_folder.RunFolder, "log_trajectories", 3, True, id="after-logging"),
    pytest.param(ladder, "evaluate", 3, True, id="evaluation-during-rl"),
    pytest.param(run_folder.RunFolder, "cursor", 6, True, id="rl-checkpoint"),
    pytest.param(ladder, "export_model", 1, False, id="export"),
    pytest.param(ladder, "write_reports", 1, False, id="report"),
]


@pytest.mark.parametrize(("owner", "name", "call", "after"), PLACES)
def test_a_run_resumed_after_an_exception_is_the_quiet_run(
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
            train(digit_recipe(tmp_path, "run", *FULL))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(("model.lora.rank=4", "rl.kl.coefficient=0.01"), id="adapter"),  # fault 113
        pytest.param(("model.dtype=bfloat16",), id="bf16"),
        pytest.param(("sft=null", "rl.algorithm=gspo", "rl.kl.coefficient=0.02"), id="no-sft-gspo"),
        pytest.param(
            ("model.train_embeddings=false", "rl.algorithm=dapo"),
            id="frozen-embeddings-dapo",
        ),
        pytest.param(
            ("rl.algorithm=ppo", "rl.kl.coefficient=0.02", "rl.kl.target=0.5", "rl.updates_per_batch=2"),
            id="ppo",
        ),
        pytest.param(
            (
                "rl.algorithm=ppo",
                "rl.critic.trunk=shared",
                "rl.kl.coefficient=0.05",
                "rl.kl.reference_every=1",
                "rl.entropy.target=1.0",
            ),
            id="shared-critic-new-reference",
        ),
    ],
)
def test_other_kinds_of_runs_resume_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: tuple[str, ...]
) -> None:
    calm = train(digit_recipe(tmp_path, "calm", *variant))
    with monkeypatch.context() as patch:
        at_call(patch, rl, "rl_update", 4, crash, after=True)
        with pytest.raises(Crash):
            train(digit_recipe(tmp_path, "run", *variant))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", calm)


SIGNALS = [
    pytest.param(fitting, "sft_update", 3, False, "sft step 3", id="update-inside-an-epoch"),
    pytest.param(fitting, "sft_update", 6, True, "sft step 6", id="last-update-of-an-epoch"),
    pytest.param(fitting, "validation_loss", 3, False, "sft step", id="validation"),
    pytest.param(ladder, "save_tensors", 1, False, "sft step 6", id="checkpoint"),
    pytest.param(ladder, "evaluate", 2, True, "after sft", id="evaluation-after-sft"),
    pytest.param(Workbench, "play", 3, True, "rl step 2", id="rollout"),
    pytest.param(rl, "rl_update", 3, False, "rl step 2", id="update"),
    pytest.param(ladder, "evaluate", 4, True, "rl step 4", id="evaluation-during-rl"),
]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_stops_a_run(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """SIGTERM is what a scheduler sends before it takes the machine away."""
    with monkeypatch.context() as patch:
        at_call(patch, rl, "make_batch", 3, lambda: signal.raise_signal(number), after=False)
        with pytest.raises(RunStopped, match="rl step 3"):
            train(digit_recipe(tmp_path, "run", *FULL))
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_a_ctrl_c_between_sampling_and_learning_loses_no_task(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 109: the tasks of step 3 were drawn, and nothing was learned from them."""
    calls, real = 0, rl.uninterrupted

    def late() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(rl, "uninterrupted", late)
        with pytest.raises(RunStopped, match="rl step 2"):
            train(digit_recipe(tmp_path, "run", *FULL))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


@pytest.mark.parametrize(("owner", "name", "call", "after", "where"), SIGNALS)
def test_a_run_resumed_after_ctrl_c_is_the_quiet_run(
    tmp_path: Path,
    quiet: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
    where: str,
) -> None:
    """Nothing of the work up to the step that was under way is done again."""
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, interrupt, after=after)
        with pytest.raises(RunStopped, match=f"stopped by Ctrl-C (at )?{where}.*stepladder resume"):
            train(digit_recipe(tmp_path, "run", *FULL))
    before = len(lines(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "summary.txt").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "cut_back", _counting(run_folder.RunFolder.cut_back, cut := []))
        resume(tmp_path / "run")
    assert cut == [before]
    assert_same(tmp_path / "run", quiet)


def _counting(honest: Any, seen: list[int]) -> Any:
    def cut_back(self: Any, cursor: Any) -> None:
        honest(self, cursor)
        seen.append(len(self.metrics()))

    return cut_back


def test_ctrl_c_before_any_training(tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, ladder, "evaluate", 1, interrupt, after=True)
        with pytest.raises(RunStopped, match="before any training"):
            train(digit_recipe(tmp_path, "run", *FULL))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_a_second_ctrl_c_inside_an_update_saves_nothing_of_it(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        at_call(patch, rl, "rl_update", 3, twice, after=True)
        with pytest.raises(RunStopped, match="second Ctrl-C; the newest checkpoint is kept"):
            train(digit_recipe(tmp_path, "run", *FULL))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_the_reference_is_written_whole_or_not_at_all(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = reference.save_tensors

    def torn(path: Path, tensors: Any) -> None:
        honest(path, tensors)
        if "reference" in path.name:
            os.truncate(path, 100)
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(reference, "save_tensors", torn)
        with pytest.raises(Crash):
            train(digit_recipe(tmp_path, "run", *FULL))
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_a_lost_reference_is_refused_instead_of_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, Workbench, "play", 4, crash, after=False)
        with pytest.raises(Crash):
            train(digit_recipe(tmp_path, "run", *FULL))
    (tmp_path / "run" / "reference.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model that the rung began with"):
        resume(tmp_path / "run")


# -- a full disk -------------------------------------------------------------------------------------------


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        pytest.param(ladder, "save_tensors", 3, id="checkpoint"),
        pytest.param(run_folder, "_write_all", 9, id="log"),
        pytest.param(ladder, "export_model", 1, id="export"),
        pytest.param(ladder, "write_reports", 1, id="report"),
    ],
)
def test_a_full_disk_is_one_message_and_costs_nothing(
    tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, _full, after=False)
        with pytest.raises(CheckpointError, match=r"(too full|make room|Make room)"):
            train(digit_recipe(tmp_path, "run", *FULL))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").latest() is not None
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", quiet)


def test_a_report_that_fails_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, Workbench, "play", 2, crash, after=False)
    at_call(monkeypatch, ladder, "write_reports", 1, _full, after=False)
    with pytest.raises(Crash):
        train(digit_recipe(tmp_path))


# -- what the loop refuses ---------------------------------------------------------------------------------


class Dead:
    """An environment whose machine is gone."""

    inline = True
    tasks = staticmethod(lambda split: ["?"] * 20)

    async def reset(self, task: Any, *, seed: int) -> Any:
        raise OSError("connection refused")

    async def step(self, message: Any) -> Any:
        raise AssertionError


def test_a_world_in_which_everything_fails_ends_the_run(tmp_path: Path) -> None:
    world = f"environment.name={__file__}:Dead"
    with pytest.raises(EnvironmentFault, match=r"all 12 episodes of this step failed.*connection refused"):
        train(digit_recipe(tmp_path, "run", "sft=null", world))
    assert lines(tmp_path / "run" / "evaluations.jsonl")[0]["failed"] == 6


def test_an_engine_that_is_not_on_the_new_weights_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is on in every step, also where no reward was earned: the raw model here earns none."""
    from stepladder.engines.local.engine import LocalEngine
    from stepladder.errors import InvariantError

    monkeypatch.setattr(LocalEngine, "sync", lambda self, version: None)
    monkeypatch.setattr(LocalEngine, "version", 0, raising=False)
    with pytest.raises(InvariantError, match="the weight sync did not arrive"):
        train(digit_recipe(tmp_path, "run"))


# -- the command line --------------------------------------------------------------------------------------


def test_ctrl_c_at_the_command_line_saves_and_tells_how_to_go_on(tmp_path: Path) -> None:
    from stepladder.run.toml import to_toml

    recipe = digit_recipe(tmp_path, "run", "rl.steps=100000", "evaluation.raw=0")
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(recipe.model_dump(mode="json", exclude_none=True)))
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", "stepladder.cli", "train", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("rl 3/"):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert f"Go on with: stepladder resume {tmp_path / 'run'}" in err
    assert "Traceback" not in err
    done = [m["step"] for m in lines(tmp_path / "run" / "metrics.jsonl") if m["phase"] == "rl"]
    state = CheckpointStore(tmp_path / "run" / "checkpoints")
    latest = state.latest()
    assert latest is not None
    assert state.load_state(latest)["state"]["step"] == done[-1] == len(done)


def test_progress_without_a_terminal_is_a_line_a_step(recipe: Recipe) -> None:
    from io import StringIO

    out = StringIO()
    ladder.train(recipe, display=Display(Console(file=out, width=200)))
    text = out.getvalue()
    assert "rl 5/5  reward " in text  # fault 123: not the loss, which is 0 by construction
    assert "grad " in text
    assert "raw: " in text
    assert "95%" in text
    assert "failed" not in text


def test_failures_are_counted_where_they_are_seen() -> None:
    from io import StringIO

    out = StringIO()
    display = Display(Console(file=out, width=200))
    display.start("rl", 9, 0)
    display.step(1, {"reward": 0.5, "failed": 3.0, "unscored": 0.0})
    assert "rl 1/9  reward 0.50  failed 3" in out.getvalue()
    assert "unscored" not in out.getvalue()
