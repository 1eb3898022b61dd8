"""Climb a recipe's rungs in order, with held-out evaluations between; survive a kill.

    raw -> few-shot -> sft -> ... -> rl -> report

A checkpoint is taken at step boundaries. Whatever was logged after the newest one is cut away on resume,
so a resumed run's files have every step once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepladder.errors import CheckpointError, ConfigError, RunStopped, StepladderError
from stepladder.evaluation import WithExamples, evaluate, held_out
from stepladder.plugins import import_path
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.policies.export import export_model
from stepladder.policies.tensors import load_tensors, room_for, save_tensors
from stepladder.recipe.config import Recipe, parse_recipe
from stepladder.reports.write import write_reports
from stepladder.run.folder import RunFolder
from stepladder.run.forecast import Forecast
from stepladder.run.interrupt import Abandoned, stoppable, uninterrupted
from stepladder.run.progress import Display
from stepladder.run.records import evaluation_record
from stepladder.run.tracking import open_tracker, require_tracker
from stepladder.rungs.base import Rung, load_policy, policy_tensors
from stepladder.rungs.registry import RUNGS, needs_of, prepare_run, rungs_of, trains_policy
from stepladder.workbench.bench import Workbench
from stepladder.workbench.paths import anchored, refuse_own_inputs
from stepladder.workbench.prepare import resolved

log = logging.getLogger("stepladder")

TENSORS = "state.safetensors"
CHECKPOINT_SECONDS = 60.0  # an epoch on a few rows is over sooner than its checkpoint


def train(
    recipe: Recipe | Mapping[str, Any],
    *,
    environment: type | None = None,
    overwrite: bool = False,
    display: Display | None = None,
) -> Path:
    """Run a recipe in a new folder; returns the folder. Ctrl-C saves and raises RunStopped.

    `environment`: your own class, instead of a name in the recipe; it must be importable (a module or a
    file), so that `resume` finds it again.
    """
    if isinstance(recipe, Recipe):
        if environment is not None:
            raise ConfigError(
                f"a loaded recipe names its environment already, so environment={environment!r} would be "
                "ignored; name yours there: load_recipe(name, ['environment.name=my_file.py:MyWorld'])"
            )
    else:
        if not isinstance(recipe, Mapping):
            raise ConfigError(
                f"train takes a recipe as a dict of sections or from load_recipe; got {recipe!r}. A bundled "
                "recipe or a file: train(load_recipe('hidden_digit'))"
            )
        sections = dict(recipe)
        if environment is not None:
            sections["environment"] = {**sections.get("environment", {}), "name": import_path(environment)}
        recipe = parse_recipe(sections)
    require_tracker(recipe.run.track)
    path = Path(recipe.run.out) / recipe.run.name
    if RunFolder.check_new(path, overwrite=overwrite):
        refuse_own_inputs(recipe, path)
    # Resolved once and recorded, so that a resumed run computes where and in what this one did. The engine
    # computes in the policy's type; rl.off_policy.correction = "auto" follows from the two.
    recipe = anchored(recipe.model_copy(update={"model": resolved(recipe.model)}))
    bench = prepare_run(recipe)  # every refusal comes before the folder is made
    with contextlib.closing(bench):
        data = recipe.model_dump(mode="json", exclude_none=True)
        device = str(bench.policy.device)
        with RunFolder.create(path, data, overwrite=overwrite, device=device) as folder:
            Ladder(bench, recipe, folder, display or Display()).climb()
    return path


def resume(path: Path, *, display: Display | None = None) -> Path:
    """Continue a run from its newest whole checkpoint, or from its start where there is none."""
    with RunFolder.open(path) as folder:
        recipe = parse_recipe(folder.recipe())
        with contextlib.closing(prepare_run(recipe)) as bench:
            Ladder(bench, recipe, folder, display or Display()).climb()
    return path


class Ladder:
    """The state of a run: which rungs are done, and the one being climbed. It is the `Run` of its rungs."""

    def __init__(self, bench: Workbench, recipe: Recipe, folder: RunFolder, display: Display) -> None:
        self.bench, self.folder, self.display = bench, folder, display
        bench.memory.say, bench.memory.recompute = display.note, bench.policy.recompute_layers
        self.recipe = recipe
        self.store = CheckpointStore(folder.checkpoints, keep=self.recipe.run.keep_checkpoints)
        self.tracker = open_tracker(
            recipe.run.track,
            project="stepladder",
            name=recipe.run.name,
            folder=folder.path,
            recipe=recipe.model_dump(mode="json"),
        )
        self.count = 0  # checkpoints of all rungs, so that their names only grow
        self.done: dict[str, int] = {}  # finished rungs and their steps
        self.rung: Rung | None = None
        self.saved_at = time.monotonic()
        self.forecast = Forecast(recipe, needs_of(recipe), folder.path, display.note)

    def climb(self) -> None:
        """Do what is left to do. An interruption is saved and named; other errors leave the checkpoints."""
        self._restore()
        try:
            self._climb_or_stop()
        except BaseException:
            try:
                self.report()
            except (OSError, StepladderError) as error:  # must not hide what ended the run
                log.warning("the report of %s could not be written: %s", self.folder.path, error)
            raise
        finally:
            self.tracker.close()
        self.report()

    def _climb_or_stop(self) -> None:
        go_on = f"Go on with: stepladder resume {self.folder.path}"
        try:
            with stoppable():
                self._climb()
        except Abandoned:  # weights and counters may be half a step apart
            raise RunStopped(
                f"stopped at once by a second Ctrl-C; the newest checkpoint is kept. {go_on}"
            ) from None
        except KeyboardInterrupt:
            if self.rung is None and not self.done:
                raise RunStopped(f"stopped by Ctrl-C before any training. {go_on}") from None
            self.save()
            raise RunStopped(
                f"stopped by Ctrl-C {self._where()}; everything up to there is saved. {go_on}"
            ) from None

    def _climb(self) -> None:
        e = self.recipe.evaluation
        if e.raw:
            self.evaluate("raw", 0, e.raw)
        if e.few_shot:
            self.evaluate("few-shot", 0, e.raw or e.tasks, examples=e.few_shot)
        for kind in rungs_of(self.recipe):
            if getattr(getattr(self.recipe, kind.name), "epochs", 1) == 0:  # [sft] may only feed rl.replay
                continue
            if kind.name not in self.done:
                self._climb_rung(kind)
            if trains_policy(kind):
                self.evaluate(kind.name, self.done[kind.name], e.tasks)
        if not any(trains_policy(RUNGS[name]) for name in self.done):
            return  # the policy is what it was; a reward model has a folder of its own
        self.display.status("saving the model")
        with room_for("the trained model", self.folder.path):
            policy, stops = self.bench.policy, self.bench.renderer.stop_token_ids
            export_model(policy.model, policy.tokenizer, self.folder.final, stop_token_ids=stops)

    def _climb_rung(self, kind: type[Rung]) -> None:
        if self.rung is None:
            self.rung = kind(self)
        self.forecast.begin(kind.name)
        self.rung.climb()
        self.forecast.end()
        with uninterrupted():  # a rung is done, synced and saved, or none of them
            self.done[kind.name] = self.rung.step
            if trains_policy(kind) and not kind.syncs_engine:
                self.bench.sync()
            self.rung = None
            self.save()

    # -- what the rungs use ---------------------------------------------------------------------------

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.log({"step": step, "phase": phase, **metrics})
        self.tracker.log(phase, step, metrics)
        self.display.step(step, metrics)
        self.forecast.saw(phase, step, metrics)

    def evaluate(
        self, label: str, step: int, n: int | None = None, *, examples: int = 0, keep: int | None = None
    ) -> None:
        """Evaluate once: a resumed run finds the line and goes on. Without an environment: not at all."""
        done = any(line["rung"] == label for line in self.folder.evaluations())
        if done or self.recipe.environment is None:
            return
        e = self.recipe.evaluation
        player = self.bench.player
        if examples:
            shown = player.world.demonstrations(examples, self.recipe.run.seed + 2)
            player = replace(player, world=WithExamples(player.world, shown))
        tasks = held_out(self.bench.world, e.split, e.tasks if n is None else n)
        self.display.start(f"evaluating {label}", len(tasks), 0, unit="tasks")
        result = self.bench.runner.run(
            evaluate(
                player,
                tasks,
                temperature=e.temperature,
                seed=self.recipe.run.seed,
                on_trajectory=self.display.trajectory,
            )
        )
        kept = e.examples if keep is None else keep
        self.folder.log_evaluation(evaluation_record(label, step, result, kept, self.bench.renderer.decode))
        self.display.evaluation(label, result)

    def save(self) -> None:
        """A checkpoint of where the run stands."""
        rung = self.rung
        tensors = rung.tensors() if rung is not None else policy_tensors(self.bench.policy.model)
        state = {
            "count": self.count + 1,
            "done": self.done,
            "rung": rung.name if rung is not None else None,
            "state": rung.state() if rung is not None else {},
            "engine_version": self.bench.engine_version,
            "memory": self.bench.memory.state(),
            "cursor": self.folder.cursor(),
        }
        self.count += 1
        self.display.status("checkpoint")
        self.store.save(self.count, lambda folder: save_tensors(folder / TENSORS, tensors), state)
        self.saved_at = time.monotonic()

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved_at >= CHECKPOINT_SECONDS:
            self.save()

    # -- the way back ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        latest = self.store.latest()
        if latest is None:
            self.folder.cut_back({})
            return
        state = self.store.load_state(latest)
        self.folder.cut_back(state["cursor"])
        tensors = load_tensors(latest / TENSORS)
        self.bench.memory.load(state["memory"])
        self.count, self.done = state["count"], dict(state["done"])
        name = state["rung"]
        if name is None:
            load_policy(self.bench.policy.model, tensors)
        else:
            if name not in RUNGS or getattr(self.recipe, name) is None:
                raise CheckpointError(
                    f"{latest} was taken on the rung {name!r}, which the recipe does not have; resume with "
                    "the recipe of the run"
                )
            self.rung = RUNGS[name](self)
            self.rung.load(state["state"], tensors)
        self.bench.sync(state["engine_version"])
        self.display.status(f"resumed from {latest.name}, {self._where()}")

    def _where(self) -> str:
        if self.rung is not None:
            return f"at {self.rung.name} step {self.rung.step}"
        name, step = list(self.done.items())[-1]
        return f"after {name} ({step} steps)"

    def report(self) -> None:
        """Write summary.txt and report.html from what is in the folder."""
        with room_for("the report", self.folder.path):
            write_reports(self.folder.path)
