"""The agent loop: turns, masks, cuts, seeds, and what happens when each part of the world breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spine import DIGIT_SYMBOLS, tiny_policy

from stepladder.agents import policy_agents
from stepladder.algorithms import ALGORITHMS
from stepladder.data.chat import Renderer
from stepladder.data.tiny_tokenizer import tiny_tokenizer
from stepladder.engines.local import LocalEngine
from stepladder.engines.scripted import Request, ScriptedEngine
from stepladder.environments.environment import as_world, load_world
from stepladder.environments.tools import tool
from stepladder.errors import EngineError, EnvironmentFault, RewardError
from stepladder.rollout import Limits, derive_seed, rollout
from stepladder.training.credit import make_batch
from stepladder.training.rl_metrics import rollout_metrics
from stepladder.training.setup import make_renderer
from stepladder.types import Group, Message, Reset, Step, Task, TextPart, Trajectory

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'


class Stage:
    """A scripted model: what each session says, turn by turn, as text."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.renderer = Renderer(self.tokenizer)
        self.end = self.tokenizer.eos_token_id

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), *([self.end] if end else [])]

    def says(self, *turns: str, **settings: Any) -> ScriptedEngine:
        """Every session says `turns` in order."""
        return ScriptedEngine(lambda request: self.ids(turns[request.turn]), **settings)

    def play(
        self,
        engine: Any,
        world: Any,
        *,
        tasks: int = 1,
        group_size: int = 1,
        split: str = "train",
        max_tokens: int = 400,
        max_context: int = 4000,
        seed: int = 0,
        **limits: Any,
    ) -> list[Group]:
        agents = policy_agents(
            engine, self.renderer, temperature=1.0, max_tokens=max_tokens, max_context=max_context
        )
        return asyncio.run(
            rollout(
                agents,
                world,
                [(f"g{i}", world.get(split, i)) for i in range(tasks)],
                group_size=group_size,
                limits=Limits(**limits),
                seed=seed,
            )
        )

    def one(self, engine: Any, world: Any, **settings: Any) -> Trajectory:
        return self.play(engine, world, **settings)[0].trajectories[0]


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


class Base:
    """Ends after `turns` answers, each worth 1."""

    inline = True
    turns = 2
    tasks = staticmethod(lambda split: [{"prompt": f"{i}?", "seed": 100 + i} for i in range(8)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.said: list[str] = []
        return Reset(task.messages, info={"seed": seed})

    async def step(self, message: Message) -> Step:
        self.said.append(message.text)
        done = len(self.said) == self.turns
        return Step(() if done else (Message("user", "go on"),), reward=1.0, terminated=done)

    async def close(self) -> None:
        pass


def texts(trajectory: Trajectory, role: str) -> list[str]:
    return [m.text for m in trajectory.messages if m.role == role]


# -- the loop ----------------------------------------------------------------------------------------------


def test_a_calculator_episode_token_by_token(stage: Stage) -> None:
    """Two turns: a call, its result, the answer. Exactly the sampled ids are trained, stop token included."""
    world = load_world("calculator")
    task = world.get("train", 0)
    engine = stage.says(CALL % "12*(3+4)", f"Answer: {task.reference}")
    t = stage.one(engine, world)
    assert t.failure is None
    assert t.stop_reason == "terminated"
    assert texts(t, "tool") == ["84"]
    assert t.score.value == 1.0
    assert t.score.parts == {"correct": 1.0}
    assert t.num_tool_calls == 1
    first, second = t.turns
    said = [stage.ids(CALL % "12*(3+4)"), stage.ids(f"Answer: {task.reference}")]
    assert [list(first.token_ids), list(second.token_ids)] == said
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.token_ids)] == (
        *first.prompt_ids,
        *first.token_ids,
    )
    (sample,) = t.samples
    assert [i for i, m in zip(sample.token_ids, sample.mask, strict=True) if m] == said[0] + said[1]
    assert sample.token_ids[-1] == stage.end
    assert sample.mask[-1]
    spoken = stage.renderer.decode([i for i, m in zip(sample.token_ids, sample.mask, strict=True) if not m])
    assert "84" in spoken  # the tool's answer is context, not training
    assert spoken.endswith("<|assistant|>")
    assert sample.token_ids == second.prompt_ids + second.token_ids
    assert engine.open_sessions == 0


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": \n</tool_call>',
        "<tool_call>\n[]\n</tool_call>",
        '<tool_call>\n"calculator"\n</tool_call>',
        '<tool_call>\n{"arguments": {"expression": "1"}}\n</tool_call>',
        '<tool_call>\n{"name": "calculater", "arguments": {"expression": "1"}}\n</tool_call>',
        '<tool_call>\n{"name": "calculator", "arguments": {"expresion": "1"}}\n</tool_call>',
        CALL % "1/0",
        CALL % "__import__(1)",
    ],
)
def test_a_bad_call_is_told_to_the_model_and_the_episode_goes_on(stage: Stage, broken: str) -> None:
    """Fault 92."""
    world = load_world("calculator")
    t = stage.one(stage.says(broken, f"Answer: {world.get('train', 0).reference}"), world)
    (answer,) = texts(t, "tool")
    assert answer.startswith("Error: ")
    assert t.stop_reason == "terminated"
    assert t.score.value == 1.0


def test_a_storm_of_calls_is_capped_with_one_summary(stage: Stage) -> None:
    """Fault 94: 50 calls in one message, eight are run, one line speaks for the others."""
    world = load_world("calculator")
    t = stage.one(
        stage.says("\n".join([CALL % "1+1"] * 50), "Answer: 0"), world, max_tokens=6000, max_context=20000
    )
    answers = texts(t, "tool")
    assert answers[:8] == ["2"] * 8
    assert len(answers) == 9
    assert "42 of 50 calls were not run" in answers[8]


class Shouting(Base):
    answer: Any = "x" * 200_000

    async def step(self, message: Message) -> Step:
        self.said.append(message.text)
        if len(self.said) == 2:
            return Step(reward=1.0, terminated=True)
        return Step((Message("user", self.answer),))


@pytest.mark.parametrize("answer", ["x" * 200_000, (TextPart("x" * 200_000),)])
def test_a_huge_observation_is_cut_with_a_mark(stage: Stage, answer: Any) -> None:
    """Fault 95: 200,000 characters become 100 tokens and a line that says so; the episode goes on."""

    class Loud(Shouting):
        pass

    Loud.answer = answer
    t = stage.one(stage.says("a", "b"), as_world(Loud), max_observation_tokens=100)
    assert t.stop_reason == "terminated"
    shown = texts(t, "user")[-1]
    assert shown == "x" * 100 + "\n... [cut: the first 100 of 200000 tokens]"
    assert t.info["observations_cut"] == 1
    assert len(t.samples[0].token_ids) < 250


def test_an_observation_that_fits_is_left_alone(stage: Stage) -> None:
    class Quiet(Shouting):
        answer = "y" * 100

    t = stage.one(stage.says("a", "b"), as_world(Quiet), max_observation_tokens=100)
    assert texts(t, "user")[-1] == "y" * 100
    assert "observations_cut" not in t.info


@pytest.mark.model
def test_an_observation_is_measured_in_tokens_not_in_characters(real_policy: Any) -> None:
    """Forty characters that are more than forty tokens: a byte-level vocabulary spells rare ones in bytes."""
    renderer = Renderer(real_policy.tokenizer)
    text = "\U0001f9ec\u16a0" * 20
    count = len(real_policy.tokenizer.encode(text))
    assert count > 60

    class Rare(Shouting):
        answer = text

    engine = ScriptedEngine(lambda request: [25, *renderer.stop_token_ids[-1:]])
    agents = policy_agents(engine, renderer, temperature=1.0, max_tokens=8, max_context=2000)
    world = as_world(Rare)
    (group,) = asyncio.run(
        rollout(
            agents,
            world,
            [("g", world.get("train", 0))],
            group_size=1,
            limits=Limits(max_observation_tokens=50),
            seed=0,
        )
    )
    assert f"[cut: the first 50 of {count} tokens]" in texts(group.trajectories[0], "user")[-1]


def test_a_turn_that_is_cut_by_length_is_neither_executed_nor_graded(stage: Stage) -> None:
    whole = CALL % "1+1"
    engine = ScriptedEngine(lambda request: stage.ids(whole))
    t = stage.one(engine, load_world("calculator"), max_tokens=len(whole) - 5)
    assert t.stop_reason == "length"
    assert t.truncated
    assert texts(t, "tool") == []
    assert t.rewards == (0.0,)
    assert t.score.value == 0.0
    assert t.failure is None
    assert t.samples[0].num_trained == len(whole) - 5


def test_a_context_that_runs_out_is_named(stage: Stage) -> None:
    """The prompt takes 4 tokens: <|bos|> is the first, then marker, "0?", end, marker. A budget that leaves
    three tokens for a turn of ten ends the episode as "context", not as "length"."""
    engine = stage.says("0123456789", "0123456789")
    prompt = len(stage.one(stage.says("0", "0"), as_world(Base)).turns[0].prompt_ids)
    t = stage.one(engine, as_world(Base), max_context=prompt + 3)
    assert t.stop_reason == "context"
    assert t.truncated
    assert len(t.turns[0].token_ids) == 3
    none = stage.one(stage.says("0", "0"), as_world(Base), max_context=prompt)
    assert none.stop_reason == "context"
    assert none.turns == ()
    assert none.samples == ()


def test_a_second_turn_without_room(stage: Stage) -> None:
    world = as_world(Base)
    whole = stage.one(stage.says("ab", "cd"), world)
    room = len(whole.turns[1].prompt_ids)
    t = stage.one(stage.says("ab", "cd"), world, max_context=room)
    assert t.stop_reason == "context"
    assert len(t.turns) == 1
    assert t.rewards == (1.0,)


def test_the_last_turn_ends_an_episode_that_does_not_end_itself(stage: Stage) -> None:
    class Endless(Base):
        turns = 10**9

    engine = stage.says("a", "b", "c", "d")
    t = stage.one(engine, as_world(Endless), max_turns=3)
    assert t.stop_reason == "max_turns"
    assert t.truncated
    assert len(t.turns) == 3
    assert t.score.value == 3.0


def test_truncation_by_the_environment_is_no_termination(stage: Stage) -> None:
    class Clocked(Base):
        async def step(self, message: Message) -> Step:
            return Step(reward=0.5, truncated=True)

    t = stage.one(stage.says("a"), as_world(Clocked))
    assert (t.stop_reason, t.truncated, t.score.value) == ("truncated", True, 0.5)


def test_parts_are_summed_and_one_that_is_unknown_stays_unknown(stage: Stage) -> None:
    class Parts(Base):
        async def step(self, message: Message) -> Step:
            self.said.append(message.text)
            done = len(self.said) == 2
            parts = {"a": 0.5, "b": None if done else 1.0}
            return Step(() if done else (Message("user", "?"),), 0.5, done, False, parts)

    t = stage.one(stage.says("a", "b"), as_world(Parts))
    assert t.score.value == 1.0
    assert dict(t.score.parts) == {"a": 1.0, "b": None}


# -- failures ----------------------------------------------------------------------------------------------


def breaking(phase: str, error: BaseException, *, only: Sequence[int] = (1,)) -> type:
    """A world whose episodes `only` (by their order of reset, from 0) raise `error` in `phase`."""

    class Breaking(Base):
        count = 0
        closed = 0

        async def reset(self, task: Task, *, seed: int) -> Reset:
            self.mine = type(self).count
            type(self).count += 1
            self._maybe("reset")
            return await super().reset(task, seed=seed)

        async def step(self, message: Message) -> Step:
            self._maybe("step")
            return await super().step(message)

        async def close(self) -> None:
            type(self).closed += 1
            self._maybe("close")

        def _maybe(self, now: str) -> None:
            if now == phase and self.mine in only:
                raise error

    return Breaking


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
    def script(request: Request) -> list[int]:
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


# -- seeds -------------------------------------------------------------------------------------------------


def _sampled(seed: int = 0, *, exact: bool = True, world: Any = None, group_size: int = 8) -> list[Group]:
    policy = tiny_policy(symbols=DIGIT_SYMBOLS, scale=0.05)
    engine = LocalEngine(policy.model, max_context=64, exact=exact)
    agents = policy_agents(engine, Renderer(policy.tokenizer), temperature=1.0, max_tokens=8, max_context=64)
    world = world or as_world(Base)

    async def main() -> list[Group]:
        tasks = [(f"g{i}", world.get("train", i)) for i in range(2)]
        groups = await rollout(agents, world, tasks, group_size=group_size, limits=Limits(), seed=seed)
        await engine.close()
        return groups

    return asyncio.run(main())


def tokens(groups: Sequence[Group]) -> list[Any]:
    return [[(turn.token_ids, turn.logprobs) for turn in t.turns] for g in groups for t in g.trajectories]


def test_siblings_share_the_world_and_differ_in_what_they_say() -> None:
    """Fault 99."""
    groups = _sampled()
    for i, group in enumerate(groups):
        assert {t.info["seed"] for t in group.trajectories} == {100 + i}
        assert len({t.turns[0].prompt_ids for t in group.trajectories}) == 1
        assert len({t.turns[0].sampling.seed for t in group.trajectories}) == 8
        assert len({t.turns[0].token_ids for t in group.trajectories}) > 4
    seeds = [turn.sampling.seed for g in groups for t in g.trajectories for turn in t.turns]
    assert len(set(seeds)) == len(seeds)


def test_the_same_seed_says_the_same_and_another_something_else() -> None:
    assert tokens(_sampled()) == tokens(_sampled())
    assert tokens(_sampled()) != tokens(_sampled(seed=1))


def test_exact_mode_does_not_depend_on_how_slow_the_world_is() -> None:
    class Late(Base):
        async def step(self, message: Message) -> Step:
            await asyncio.sleep(0.002 * (hash(message.text) % 7))
            return await super().step(message)

    assert tokens(_sampled()) == tokens(_sampled(world=as_world(Late)))


def test_a_failing_sibling_does_not_stop_the_others_in_exact_mode() -> None:
    """The engine waits for open sessions: those of broken episodes are closed."""
    cls = breaking("reset", OSError("gone"), only=(0, 3))
    groups = _sampled(world=as_world(cls), group_size=4)
    failed = [t.id for g in groups for t in g.trajectories if t.failure]
    assert failed == ["g0/0", "g0/3"]
    quiet = [t for g in _sampled(group_size=4) for t in g.trajectories]
    for t, other in zip([t for g in groups for t in g.trajectories], quiet, strict=True):
        if t.failure is None:
            assert [turn.token_ids for turn in t.turns] == [turn.token_ids for turn in other.turns]


def test_waves_of_limited_size_play_everything(stage: Stage) -> None:
    alive = most = 0

    class Counted(Base):
        async def reset(self, task: Task, *, seed: int) -> Reset:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            await asyncio.sleep(0)
            return await super().reset(task, seed=seed)

        async def close(self) -> None:
            nonlocal alive
            alive -= 1

    groups = stage.play(stage.says("a", "b"), as_world(Counted), tasks=3, group_size=3, concurrency=4)
    assert [t.id for g in groups for t in g.trajectories] == [f"g{i}/{k}" for i in range(3) for k in range(3)]
    assert (alive, most) == (0, 4)


@given(st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_derived_seeds_are_63_bits_and_stable(parts: list[Any]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(*parts)
    assert seed != derive_seed(*parts, 0)


# -- cancellation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0.0, 0.05])
def test_cancellation_leaves_nothing_running(stage: Stage, when: float) -> None:
    """Sessions and environments are closed, no task is left, whether episodes had begun or not."""
    opened = closed = 0

    class Waiting(Base):
        async def reset(self, task: Task, *, seed: int) -> Reset:
            nonlocal opened
            opened += 1
            return await super().reset(task, seed=seed)

        async def step(self, message: Message) -> Step:
            await asyncio.sleep(60)
            raise AssertionError

        async def close(self) -> None:
            nonlocal closed
            closed += 1

    engine, world = stage.says("a"), as_world(Waiting)
    agents = policy_agents(engine, stage.renderer, temperature=1.0, max_tokens=9, max_context=99)

    async def main() -> int:
        job = asyncio.ensure_future(
            rollout(agents, world, [("g", world.get("train", 0))], group_size=4, limits=Limits(), seed=0)
        )
        await asyncio.sleep(when)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(main()) == 0
    assert engine.open_sessions == 0
    assert opened == closed


def test_an_agent_that_cannot_be_made_closes_the_others(stage: Stage) -> None:
    engine = stage.says("a")
    make: Callable[[str], Any] = policy_agents(
        engine, stage.renderer, temperature=1.0, max_tokens=9, max_context=99
    )

    def agents(key: str) -> Any:
        if key.endswith("2"):
            raise EngineError("no more sessions")
        return make(key)

    world = as_world(Base)
    with pytest.raises(EngineError):
        asyncio.run(
            rollout(agents, world, [("g", world.get("train", 0))], group_size=4, limits=Limits(), seed=0)
        )
    assert engine.open_sessions == 0
