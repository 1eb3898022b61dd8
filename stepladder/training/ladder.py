"""Climb a recipe's rungs: evaluate the raw model, fine-tune, reinforce, evaluate after each; survive a kill.

    raw -> few-shot -> sft -> rl -> report

A checkpoint is taken at step boundaries. Whatever was logged after the newest one is cut away on resume,
so a resumed run's files have every step once.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepladder.config import Recipe, parse_recipe
from stepladder.errors import CheckpointError, RunStopped, StepladderError
from stepladder.evaluation import Evaluation, WithExamples, evaluate, held_out
from stepladder.plugins import import_path
from stepladder.policies.checkpoint import CheckpointStore, load_tensors, room_for, save_tensors
from stepladder.policies.export import export_model
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.reports.write import write_reports
from stepladder.training.demonstrations import sft_samples
from stepladder.training.interrupt import Abandoned, stoppable, uninterrupted
from stepladder.training.progress import Display
from stepladder.training.records import trajectory_to_dict
from stepladder.training.rl import RlState, run_rl
from stepladder.training.run_folder import RunFolder
from stepladder.training.setup import Workbench, prepare, resolved
from stepladder.training.sft import SftState, run_sft
from stepladder.training.tasks import TaskSampler
from stepladder.training.tracking import open_tracker, require_tracker
from stepladder.types import Group

log = logging.getLogger("stepladder")

TENSORS = "state.safetensors"
REFERENCE = "reference.safetensors"
SFT_CHECKPOINT_SECONDS = 60.0  # an epoch on a few demonstrations is over sooner than its checkpoint


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
    if not isinstance(recipe, Recipe):
        sections = dict(recipe)
        if environment is not None:
            sections["environment"] = {**sections.get("environment", {}), "name": import_path(environment)}
        recipe = parse_recipe(sections)
    require_tracker(recipe.run.track)
    path = Path(recipe.run.out) / recipe.run.name
    RunFolder.check_new(path, overwrite=overwrite)
    # Resolved once and recorded, so that a resumed run computes where and in what this one did. The engine
    # computes in the policy's type; rl.correction = "auto" follows from the two.
    recipe = recipe.model_copy(update={"model": resolved(recipe.model)})
    bench = prepare(recipe)  # every refusal comes before the folder is made
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
        with contextlib.closing(prepare(recipe)) as bench:
            Ladder(bench, recipe, folder, display or Display()).climb()
    return path


class Ladder:
    """The state of a run: which rung, which step, and the optimiser of the rung."""

    def __init__(self, bench: Workbench, recipe: Recipe, folder: RunFolder, display: Display) -> None:
        self.bench, self.folder, self.display = bench, folder, display
        self.recipe = recipe
        self.store = CheckpointStore(folder.checkpoints, keep=self.recipe.run.keep_checkpoints)
        self.tracker = open_tracker(
            recipe.run.track,
            project="stepladder",
            name=recipe.run.name,
            folder=folder.path,
            recipe=recipe.model_dump(mode="json"),
        )
        self.count = 0  # checkpoints and steps of all rungs, so that checkpoint names only grow
        self.rung = "start"
        self.saved_at = time.monotonic()
        self.sft = SftState()
        self.rl = RlState()
        self.sampler: TaskSampler | None = None
        self.optimizer: MasterOptimizer | None = None

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
            if self.optimizer is None:
                raise RunStopped(f"stopped by Ctrl-C before any training. {go_on}") from None
            self._save()
            raise RunStopped(
                f"stopped by Ctrl-C at {self.rung} step {self._step()}; everything up to there is saved. "
                f"{go_on}"
            ) from None

    def _climb(self) -> None:
        e = self.recipe.evaluation
        if e.raw:
            self._evaluate("raw", 0, e.raw)
        if e.few_shot:
            self._evaluate("few-shot", 0, e.raw or e.tasks, examples=e.few_shot)
        if self.recipe.sft is not None:
            if self.rung in ("start", "sft"):
                self._climb_sft()
            self._evaluate("sft", self.sft.step, e.tasks)
        if self.recipe.rl is not None:
            self._climb_rl()
            self._evaluate("rl", self.rl.step, e.tasks)
        self.display.status("saving the model")
        with room_for("the trained model", self.folder.path):
            policy, stops = self.bench.policy, self.bench.renderer.stop_token_ids
            export_model(policy.model, policy.tokenizer, self.folder.final, stop_token_ids=stops)

    # -- rungs ----------------------------------------------------------------------------------------

    def _climb_sft(self) -> None:
        settings = self.recipe.sft
        assert settings is not None
        samples, validation = sft_samples(self.bench, settings, seed=self.recipe.run.seed)
        with self._training("sft", settings.max_grad_norm) as optimizer:
            per_epoch = math.ceil(len(samples) / settings.batch_size)
            self.display.start("sft", settings.epochs * per_epoch, self.sft.step)

            def on_step(step: int, metrics: Mapping[str, float]) -> None:
                self._log("sft", step, metrics)

            def on_epoch(state: SftState) -> None:
                self.sft = state
                if time.monotonic() - self.saved_at >= SFT_CHECKPOINT_SECONDS:
                    self._save()

            self.sft = run_sft(
                self.bench.policy,
                optimizer,
                samples,
                validation,
                settings,
                self.sft,
                seed=self.recipe.run.seed,
                on_step=on_step,
                on_epoch=on_epoch,
            )
            self.sft.best = {}
            self.rung = "sft-done"
            self.bench.engine.sync(self.bench.engine.version + 1)
            self._save()

    def _climb_rl(self) -> None:
        settings = self.recipe.rl
        assert settings is not None
        seed = self.recipe.run.seed
        sampler = TaskSampler(self.bench.world, "train", mode=settings.sampling, seed=seed)
        if self.sampler is not None:
            sampler = self.sampler
        self.sampler = sampler
        reference = self._reference() if settings.row().kl_in == "loss" else None
        with self._training("rl", settings.max_grad_norm) as optimizer:
            self.display.start("rl", settings.steps, self.rl.step)

            def on_step(step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
                self._log("rl", step, metrics)
                played = [t for group in groups for t in group.trajectories]
                self.folder.log_trajectories(played, step=step, phase="rl")
                if settings.evaluate_every and step % settings.evaluate_every == 0 and step < settings.steps:
                    with self.display.aside():
                        self._evaluate(f"rl-{step}", step, self.recipe.evaluation.tasks, keep=0)
                if step % self.recipe.run.checkpoint_every == 0:
                    self._save()

            run_rl(
                self.bench,
                optimizer,
                sampler,
                settings,
                self.rl,
                seed=seed,
                on_step=on_step,
                on_trajectory=self.display.trajectory,
                reference=reference,
            )
            self.rung = "rl-done"
            self._save()

    @contextlib.contextmanager
    def _training(self, rung: str, max_grad_norm: float) -> Iterator[MasterOptimizer]:
        """The rung's optimiser, with the restored state if the run was resumed inside this rung."""
        with uninterrupted():  # the name of the rung and its optimiser change together
            optimizer = self.optimizer
            if optimizer is None or self.rung != rung:
                if optimizer is not None:
                    optimizer.close()
                optimizer = MasterOptimizer(self.bench.policy.trainable(), max_grad_norm=max_grad_norm)
            if self.rung != f"{rung}-done":
                self.rung = rung
            self.optimizer = optimizer
        yield optimizer

    def _reference(self) -> Policy:
        """The policy as it was when RL began, for the KL term; kept in the run folder."""
        path = self.folder.path / REFERENCE
        model = copy.deepcopy(self.bench.policy.model)
        names = dict(model.named_parameters())
        if path.is_file():
            saved = load_tensors(path)
            with torch.no_grad():
                for name, tensor in saved.items():
                    names[name].copy_(tensor)
        elif self.rl.step:
            raise CheckpointError(
                f"{path} is gone: it holds the model that RL began with, which the KL term is measured from; "
                "put it back, or start the run anew"
            )
        else:
            aside = path.with_name(f".{REFERENCE}.new")
            with room_for("the reference model", self.folder.path):
                save_tensors(aside, {n: p.detach() for n, p in names.items() if p.requires_grad})
            os.replace(aside, path)  # a kill while it is written leaves no half of it
        model.requires_grad_(False)
        return Policy(model, self.bench.policy.tokenizer, mode=self.bench.policy.mode)

    def _log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.log({"step": step, "phase": phase, **metrics})
        self.tracker.log(phase, step, metrics)
        self.display.step(step, metrics)

    # -- evaluation -----------------------------------------------------------------------------------

    def _evaluate(self, rung: str, step: int, n: int, *, examples: int = 0, keep: int | None = None) -> None:
        """Evaluate once: a resumed run finds the line and goes on."""
        if any(line["rung"] == rung for line in self.folder.evaluations()):
            return
        e = self.recipe.evaluation
        world = self.bench.world
        if examples:
            world = WithExamples(world, world.demonstrations(examples, self.recipe.run.seed + 2))
        tasks = held_out(self.bench.world, e.split, n)
        self.display.start(f"evaluating {rung}", len(tasks), 0, unit="tasks")
        result = self.bench.runner.run(
            evaluate(
                self.bench.agents(e.temperature),
                world,
                tasks,
                temperature=e.temperature,
                limits=self.bench.limits,
                seed=self.recipe.run.seed,
                scorer=self.bench.scorer,
                on_trajectory=self.display.trajectory,
            )
        )
        kept = e.examples if keep is None else keep
        self.folder.log_evaluation(evaluation_record(rung, step, result, kept, self.bench.renderer.decode))
        self.display.evaluation(rung, result)

    # -- checkpoints ----------------------------------------------------------------------------------

    def _step(self) -> int:
        return self.rl.step if self.rung.startswith("rl") else self.sft.step

    def _save(self) -> None:
        assert self.optimizer is not None
        tensors = self.optimizer.tensors()
        if not self.sft.at_best:  # else the masters are the best weights
            tensors |= {f"best/{name}": t for name, t in self.sft.best.items()}
        state = {
            "rung": self.rung,
            "count": self.count + 1,
            "sft": self.sft.plain(),
            "sft_at_best": self.sft.at_best,
            "rl": self.rl.plain(),
            "sampler": self.sampler.state() if self.sampler else None,
            "engine_version": self.bench.engine.version,
            "cursor": self.folder.cursor(),
        }
        self.count += 1
        self.display.status("checkpoint")
        self.store.save(self.count, lambda folder: save_tensors(folder / TENSORS, tensors), state)
        self.saved_at = time.monotonic()

    def _restore(self) -> None:
        latest = self.store.latest()
        if latest is None:
            self.folder.cut_back({})
            return
        state = self.store.load_state(latest)
        self.folder.cut_back(state["cursor"])
        tensors = load_tensors(latest / TENSORS)
        self.rung, self.count = state["rung"], state["count"]
        settings = self.recipe.rl if self.rung.startswith("rl") else self.recipe.sft
        if settings is None:
            raise CheckpointError(
                f"{latest} was taken on the rung {self.rung!r}, which the recipe does not have; resume with "
                "the recipe of the run"
            )
        self.optimizer = MasterOptimizer(self.bench.policy.trainable(), max_grad_norm=settings.max_grad_norm)
        self.optimizer.load(tensors)
        self.sft = SftState(**state["sft"])
        kept = "master/" if state["sft_at_best"] else "best/"
        self.sft.best = {k.removeprefix(kept): t for k, t in tensors.items() if k.startswith(kept)}
        self.rl = RlState(**state["rl"])
        if state["sampler"] is not None and self.recipe.rl is not None:
            self.sampler = TaskSampler(
                self.bench.world, "train", mode=self.recipe.rl.sampling, seed=self.recipe.run.seed
            )
            self.sampler.load(state["sampler"])
        self.bench.engine.sync(state["engine_version"])
        self.display.status(f"resumed from {latest.name}: {self.rung}, step {self._step()}")

    def report(self) -> None:
        """Write summary.txt and report.html from what is in the folder."""
        with room_for("the report", self.folder.path):
            write_reports(self.folder.path)


def evaluation_record(rung: str, step: int, result: Evaluation, keep: int, decode: Any) -> dict[str, Any]:
    """One line of evaluations.jsonl; examples are spread over the domains."""
    seen: set[str] = set()
    chosen = [
        t
        for t in result.trajectories
        if t.task.domain not in seen and not seen.add(t.task.domain)  # type: ignore[func-returns-value]
    ]
    return {
        "rung": rung,
        "step": step,
        "n": result.n,
        "success": result.success,
        "interval": list(result.interval),
        "tool_rate": result.tool_rate,
        "mean_tokens": result.mean_tokens,
        "failed": result.failed,
        "truncated": result.truncated,
        "by_domain": {d: {"n": n, "success": right / n} for d, (right, n) in result.by_domain.items()},
        "seconds": result.seconds,
        "temperature": result.temperature,
        "examples": [trajectory_to_dict(t, decode=decode) for t in chosen[:keep]],
    }
