"""The agent loop: turns, masks, cuts and seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spine import DIGIT_SYMBOLS, tiny_policy
from stage import CALL, Base, Stage, breaking, texts

from stepladder.data.chat.renderer import Renderer
from stepladder.engines.local.engine import LocalEngine
from stepladder.engines.scripted import ScriptedEngine
from stepladder.environments.environment import as_world, load_world
from stepladder.errors import EngineError, TemplateError
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, derive_seed, rollout
from stepladder.types import Group, ImagePart, Message, Reset, Step, Task, TextPart


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


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


@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_image_is_refused_rather_than_read_as_its_placeholder(stage: Stage, when: str) -> None:
    picture = Message("user", (ImagePart("file:cat.png"),))

    class Gallery(Base):
        async def reset(self, task: Task, *, seed: int) -> Reset:
            return Reset((picture,) if when == "reset" else task.messages)

        async def step(self, message: Message) -> Step:
            return Step((picture,))

    with pytest.raises(TemplateError, match=r"shows an image \(file:cat.png\)"):
        stage.one(stage.says("Look.", "Answer: 1"), as_world(Gallery))
