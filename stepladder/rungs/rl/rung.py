"""The rung of reinforcement learning: its parts made or restored, its log and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError, RunStopped
from stepladder.planning.needs import Needs
from stepladder.plugins import load_object
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.config import Recipe
from stepladder.recipe.rl import RlSection
from stepladder.recipe.rl_credit import CriticSection
from stepladder.rungs.base import POLICY, Rung
from stepladder.rungs.demonstrations import sft_data
from stepladder.rungs.preview import Preview
from stepladder.rungs.reference import frozen_reference, refresh_reference
from stepladder.rungs.requirements import require_judge
from stepladder.rungs.rl.critic import Critic
from stepladder.rungs.rl.group_stream import GroupStream
from stepladder.rungs.rl.loop import RlParts, run_rl
from stepladder.rungs.rl.preview import first_batch
from stepladder.rungs.rl.replay import Replay
from stepladder.rungs.rl.state import RlState, horizon
from stepladder.rungs.rl.stream import close_stream, open_stream, put_back, stream_state
from stepladder.rungs.rl.watch.watch import Watch
from stepladder.rungs.run import Run
from stepladder.rungs.tasks import TaskSampler, levels_of
from stepladder.types import Group
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources

REFERENCE = "reference.safetensors"


class RlRung(Rung):
    """Reinforcement learning in the recipe's environment."""

    name: ClassVar[str] = "rl"
    syncs_engine: ClassVar[bool] = True

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        assert world is not None
        require_judge(recipe, world)
        world.require("train", 1)
        check_settings(cls.section_of(recipe), recipe.rollout.max_turns, world)

    @classmethod
    def needs(cls, section: RlSection) -> Needs:
        row, critic = section.row(), section.critic or CriticSection()
        return Needs(
            rows=section.tasks_per_step,
            token_budget=section.token_budget,
            answers=section.group_size,
            steps=section.steps,
            shares_prompt=True,
            reference=row.kl_in != "none",
            critic=critic.trunk if row.needs_critic else "none",
            plays=True,
            plays_ahead=section.off_policy.max_staleness > 0,
            updates=section.updates_per_batch,
        )

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview:
        settings: RlSection = cls.section_of(bench.recipe)
        return first_batch(bench, settings, own_advantage(settings), samples)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.progress = RlState()
        settings: RlSection = self.section_of(run.recipe)
        self.settings = settings
        self.sampler = TaskSampler(
            run.bench.world,
            "train",
            mode=settings.tasks.sampling,
            seed=run.recipe.run.seed,
            epochs=settings.tasks.epochs,
        )
        self.stream: GroupStream | None = None
        self.waiting: list[dict[str, Any]] = []  # what a stream had begun, of an earlier process
        self.finished: dict[str, Group] = {}  # of those, what a loop without a stream can use as it is
        self.critic: Critic | None = None
        self.reference: Policy | None = None
        self.watch = Watch(run.bench, settings)

    @property
    def step(self) -> int:
        return self.progress.step

    def climb(self) -> None:
        run, settings = self.run, self.settings
        if settings.row().kl_in != "none":
            path = self._reference_path(self.progress.reference_step)
            self.reference = frozen_reference(run.bench.policy, path, must_exist=self.step > 0)
            self.watch.guard(self.reference)
        self._make_critic()
        with self.training(self._trained(), settings.max_grad_norm) as optimizer, self._stream() as stream:
            run.display.start("rl", settings.steps, self.step)
            parts = RlParts(
                run.bench,
                optimizer,
                self.sampler,
                settings,
                self.progress,
                run.recipe.run.seed,
                self.reference,
                self.critic,
                stream,
                self.finished,
                own_advantage=own_advantage(settings),
                own_loss=own_loss(settings),
                watch=self.watch,
                replay=self._replay(),
                on_trajectory=run.display.trajectory,
                between=self._between,
                on_refresh=self._refresh,
            )
            run_rl(parts, on_step=self._on_step)
        if self.critic is not None:
            self.critic.close()

    def _on_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        run, settings = self.run, self.settings
        raised = self.watch.finished(step, metrics)
        run.log("rl", step, {**metrics, "alarms": float(len(raised))})
        for alarm, changed in raised:
            run.folder.log_alarm({**alarm.plain(), "changed": changed})
            run.display.alarm(alarm.sentence(), changed)
        played = [t for group in groups for t in group.trajectories]
        run.folder.log_trajectories(played, step=step, phase="rl")
        if raised and settings.on_alarm == "stop":
            run.save()
            raise RunStopped(
                f"stopped by an alarm, as rl.on_alarm = 'stop' asks. {raised[0][0].sentence()}. All up to "
                f"there is saved; go on all the same with: stepladder resume {run.folder.path}"
            )
        if step % run.recipe.run.checkpoint_every == 0:
            run.save()

    def _between(self, step: int) -> None:
        every = self.settings.evaluate_every
        if every and step and step % every == 0:
            with self.run.display.aside():
                self.run.evaluate(f"rl-{step}", step, keep=0)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[GroupStream | None]:
        """Groups that are played while the policy is trained, where the recipe asks for it."""
        run, settings = self.run, self.settings
        if not settings.off_policy.max_staleness:
            self.finished, self.waiting = put_back(self.sampler, self.waiting, step=self.step), []
            yield None
            return
        self.stream = open_stream(
            run.bench,
            self.sampler,
            settings,
            step=self.step,
            seed=run.recipe.run.seed,
            max_turns=lambda: horizon(settings, self.progress, run.bench.limits.max_turns),
            waiting=self.waiting,
            on_trajectory=run.display.trajectory,
        )
        try:
            yield self.stream
        finally:
            # What is begun is remembered first: a Ctrl-C is saved after this.
            self.waiting = stream_state(run.bench, self.stream)
            close_stream(run.bench, self.stream)
            self.stream = None

    # -- models beside the policy -----------------------------------------------------------------------

    def _make_critic(self) -> None:
        if self.settings.row().needs_critic and self.critic is None:
            s = self.settings
            self.critic = Critic(
                self.run.bench.policy,
                s.critic or CriticSection(),
                token_budget=s.token_budget,
                max_grad_norm=s.max_grad_norm,
            )

    def _replay(self) -> Replay | None:
        """The demonstrations of [sft], where the recipe mixes them in."""
        s, recipe = self.settings, self.run.recipe
        if not s.replay.weight:
            return None
        assert isinstance(recipe, Recipe)
        assert recipe.sft is not None
        data = sft_data(self.run.bench, recipe.sft, seed=recipe.run.seed)
        self.run.folder.log_data("sft", data.facts())
        return Replay(
            self.run.bench.policy,
            data.train,
            s.replay.weight,
            s.replay.batch,
            s.token_budget,
            recipe.run.seed,
        )

    def _trained(self) -> nn.Module:
        """What the policy's optimiser trains: a shared critic's head too."""
        if self.critic is not None and self.critic.shared:
            return self.critic.model
        policy: nn.Module = self.run.bench.policy.model
        return policy

    def _reference_path(self, step: int) -> Path:
        return self.run.folder.path / (REFERENCE if step == 0 else f"reference-{step}.safetensors")

    def _refresh(self, step: int) -> None:
        """The policy of `step` becomes the reference. Older files stay while a checkpoint may need them."""
        assert self.reference is not None
        refresh_reference(self.reference, self.run.bench.policy, self._reference_path(step))
        self.watch.guard(self.reference)
        run = self.run.recipe.run
        oldest = step - (run.keep_checkpoints + 1) * run.checkpoint_every
        every = self.settings.kl.reference_every
        needed = max(oldest, 0) // every * every
        for old in range(0, needed, every):
            self._reference_path(old).unlink(missing_ok=True)

    # -- checkpoints ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        if self.stream is not None:
            self.waiting = stream_state(self.run.bench, self.stream)
        return {
            **self.progress.plain(),
            "sampler": self.sampler.state(),
            "waiting": self.waiting,
            "watch": self.watch.state(),
        }

    def tensors(self) -> dict[str, Tensor]:
        critic = self.critic.tensors() if self.critic is not None else {}
        return {**super().tensors(), **critic}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        others = ("sampler", "waiting", "watch")
        self.progress = RlState(**{k: v for k, v in state.items() if k not in others})
        self.sampler.load(state["sampler"])
        self.waiting = state["waiting"]
        self.watch.load(state["watch"])
        begun = not any(name.startswith(POLICY) for name in tensors)
        if begun:
            self._make_critic()
        self.load_optimizer(tensors, self._trained(), self.settings.max_grad_norm)
        if begun and self.critic is not None:
            self.critic.load(tensors)


def own_advantage(settings: RlSection) -> Any:
    """The user's function, or None. Raises ConfigError where the path names nothing."""
    path = settings.credit.advantage
    return None if path is None else load_object(path, what="rl.credit.advantage")


def own_loss(settings: RlSection) -> Any:
    """The same for the loss."""
    return None if settings.loss is None else load_object(settings.loss, what="rl.loss")


def check_settings(settings: RlSection, max_turns: int, world: CheckedWorld) -> None:
    """Raise ConfigError for an own function that is not there, a horizon without room, a curriculum without
    levels."""
    for key, path in (("rl.credit.advantage", settings.credit.advantage), ("rl.loss", settings.loss)):
        if path is not None and not callable(load_object(path, what=key)):
            raise ConfigError(f"{key} = {path!r} is not a function; give the path of one")
    if settings.horizon.start is not None and settings.horizon.start > max_turns:
        raise ConfigError(
            f"rl.horizon.start={settings.horizon.start} is beyond rollout.max_turns={max_turns}, to which "
            f"the horizon grows; try rl.horizon.start = {max(1, max_turns // 2)}"
        )
    if settings.tasks.sampling == "curriculum":
        levels_of(world, "train")
