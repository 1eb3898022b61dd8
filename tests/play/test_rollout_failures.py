"""What happens when each part of the world breaks, hangs or says nothing."""

from __future__ import annotations

import asyncio
import time

import pytest
from spine import tiny_policy
from stage import Base, Stage, breaking, texts

from stepladder.algorithms import ALGORITHMS
from stepladder.engines.scripted import ScriptedEngine, ScriptedRequest
from stepladder.environments.environment import as_world
from stepladder.environments.tools import tool
from stepladder.errors import EngineError, EnvironmentFault, RewardError
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, rollout
from stepladder.rungs.episodes import rollout_metrics
from stepladder.rungs.rl.credit import make_batch
from stepladder.types import Message, Reset, Step, Task
from stepladder.workbench.prepare import make_renderer


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reset", "step", "close"])
@pytest.mark.parametrize(
    "error", [OSError("sandbox gone"), ValueError("bad bytes"), KeyError("x"), EnvironmentFault("named")]
)
def test_a_broken_world_ends_its_own_episode_only(stage: Stage, phase: str, error: Exception) -> None:
    cls = breaking(phase, error)
    (group,) = stage.play(stage.says("a", "b"), as_world(cls), group_size=4)
    failed = [t for t in group.trajectories if t.failure is not None]
    assert [t.id for t in failed] == ["g0/1"]
    assert failed[0].failure is not None
    assert failed[0].failure.boundary == "environment"
    assert phase in failed[0].failure.message or "named" in failed[0].failure.message
    assert failed[0].stop_reason == "failed"
    assert failed[0].score.value is None  # never 0
    assert [t.score.value for t in group.trajectories if t.failure is None] == [2.0] * 3
    assert cls.closed == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("phase", ["reset", "step", "close"])
@pytest.mark.parametrize("error", [TypeError("no such argument"), NameError("typo"), AssertionError("never")])
def test_a_programming_error_ends_the_run_at_once_with_its_traceback(
    stage: Stage, phase: str, error: Exception
) -> None:
    engine = stage.says("a", "b")
    with pytest.raises(type(error), match=str(error)) as caught:
        stage.play(engine, as_world(breaking(phase, error)), group_size=4)
    assert any("_maybe" in str(entry) for entry in caught.traceback)
    assert engine.open_sessions == 0


def test_a_reward_that_breaks_is_unscored_not_zero(stage: Stage) -> None:
    class Graded:
        inline = True
        tasks = staticmethod(lambda split: ["a?"])

        def reward(self, answer: str) -> float:
            raise RewardError("the judge is down") if answer == "b" else ZeroDivisionError

    t = stage.one(stage.says("b"), as_world(Graded))
    assert t.failure is not None
    assert t.failure.boundary == "reward"
    assert t.score.value is None
    other = stage.one(stage.says("c"), as_world(Graded))
    assert other.failure is not None
    assert (other.failure.boundary, other.score.value) == ("reward", None)


def test_an_engine_that_returns_nothing_is_a_failure_of_the_engine(stage: Stage) -> None:
    """Fault 13's kind: an empty answer is no turn, and is never trained on."""
    t = stage.one(ScriptedEngine(lambda request: []), as_world(Base))
    assert t.failure is not None
    assert t.failure.boundary == "engine"
    assert t.samples == ()


def test_a_model_with_several_end_tokens_may_end_with_any() -> None:
    """Fault 18: the tokenizer names one, the generation config another; neither counts as cut off."""
    policy = tiny_policy()
    other = policy.tokenizer.convert_tokens_to_ids("~")
    policy.lm.generation_config.eos_token_id = [policy.tokenizer.eos_token_id, other]
    renderer = make_renderer(policy)
    assert {other, policy.tokenizer.eos_token_id} <= set(renderer.stop_token_ids)
    engine = ScriptedEngine(lambda request: [40, (other, policy.tokenizer.eos_token_id)[request.turn], 41])
    agents = policy_agents(engine, renderer, temperature=1.0, max_tokens=9, max_context=99)
    world = as_world(Base)
    (group,) = asyncio.run(
        rollout(agents, world, [("g", world.get("train", 0))], group_size=1, limits=Limits(), seed=0)
    )
    (t,) = group.trajectories
    assert t.stop_reason == "terminated"
    assert not t.truncated
    assert [turn.token_ids for turn in t.turns] == [(40, other), (40, policy.tokenizer.eos_token_id)]


def test_an_engine_that_refuses_one_request_costs_one_episode(stage: Stage) -> None:
    def script(request: ScriptedRequest) -> list[int]:
        if request.key.endswith("2"):
            raise EngineError("out of memory")
        return stage.ids("ab"[request.turn])

    engine = ScriptedEngine(script)
    (group,) = stage.play(engine, as_world(Base), group_size=4)
    assert [t.failure and t.failure.boundary for t in group.trajectories] == [None, None, "engine", None]
    assert engine.open_sessions == 0


class Hanging(Base):
    inline = False
    phase = "step"

    def _hang(self, now: str) -> None:
        if now == self.phase:
            time.sleep(0.6)

    def reset(self, task: Task, *, seed: int) -> Reset:  # type: ignore[override]
        self.said = []
        self._hang("reset")
        return Reset(task.messages)

    def step(self, message: Message) -> Step:  # type: ignore[override]
        self._hang("step")
        return Step(reward=1.0, terminated=True)

    def close(self) -> None:  # type: ignore[override]
        self._hang("close")


@pytest.mark.parametrize("phase", ["reset", "step", "close"])
def test_a_world_that_hangs_is_left_behind(stage: Stage, phase: str) -> None:
    """Fault 96: each phase has a deadline, and the reason is recorded."""
    cls = type("Stuck", (Hanging,), {"phase": phase})
    t = stage.one(stage.says("a"), as_world(cls, deadline=0.1))
    assert t.failure is not None
    assert t.failure.boundary == "environment"
    assert "within 0.1 s" in t.failure.message
    assert phase in t.failure.message


def test_a_tool_that_hangs_is_an_answer_to_the_model(stage: Stage) -> None:
    class Slow:
        tasks = staticmethod(lambda split: ["q?"])

        @tool(deadline=0.1)
        def wait(self) -> str:
            """Wait."""
            time.sleep(0.5)
            return "done"

        def reward(self, answer: str) -> float:
            return 1.0

    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    t = stage.one(stage.says(call, "ok"), as_world(Slow))
    assert texts(t, "tool") == ["Error: wait took longer than 0.1 s and was stopped"]
    assert t.score.value == 1.0


@pytest.mark.parametrize(("failing", "trained"), [((1,), 3), ((0, 1, 3), 0), ((0, 1, 2, 3), 0)])
def test_a_group_closes_with_its_survivors(stage: Stage, failing: tuple[int, ...], trained: int) -> None:
    """Fault 98: 1 of 4 fails: three are trained; 3 of 4: one alone has no baseline; 4 of 4: nothing."""

    class Scored(breaking("step", OSError("gone"), only=failing)):  # type: ignore[misc]
        async def step(self, message: Message) -> Step:
            await super().step(message)
            return Step(reward=float(self.mine), terminated=True)

    groups = stage.play(stage.says("a"), as_world(Scored), group_size=4)
    batch = make_batch(groups, ALGORITHMS["grpo"])
    assert len(batch.samples) == trained
    assert rollout_metrics(groups)["failed"] == len(failing)
    if trained:
        # Rewards 0, 2, 3: mean 5/3, sample variance (25 + 1 + 16)/9/2 = 7/3.
        wanted = [(r - 5 / 3) / ((7 / 3) ** 0.5 + 1e-6) for r in (0, 2, 3)]
        assert batch.advantages.tolist() == pytest.approx(wanted, rel=1e-5)


def test_an_unscored_episode_takes_no_part(stage: Stage) -> None:
    """None is "could not be scored" (fault 35's kind): neither 0 nor NaN reaches the baseline."""

    class Unsure(breaking("never", OSError())):  # type: ignore[misc]
        async def step(self, message: Message) -> Step:
            return Step(reward=None if self.mine == 0 else float(self.mine), terminated=True)

    groups = stage.play(stage.says("a"), as_world(Unsure), group_size=3)
    batch = make_batch(groups, ALGORITHMS["grpo"])
    assert batch.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    metrics = rollout_metrics(groups)
    assert (metrics["unscored"], metrics["failed"], metrics["reward"]) == (1.0, 0.0, 1.5)


def test_episodes_without_a_single_token_take_no_part(stage: Stage) -> None:
    """No room for the prompt in all but one sibling: one alone has no baseline, and nothing breaks."""

    class Long(breaking("never", OSError())):  # type: ignore[misc]
        async def reset(self, task: Task, *, seed: int) -> Reset:
            await super().reset(task, seed=seed)
            return Reset((Message("user", "x" * (500 if self.mine else 5)),))

    groups = stage.play(stage.says("a", "b"), as_world(Long), group_size=3, max_context=60)
    assert [t.stop_reason for t in groups[0].trajectories] == ["terminated", "context", "context"]
    assert make_batch(groups, ALGORITHMS["grpo"]).samples == []
