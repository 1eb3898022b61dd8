"""Exact mode, cancellation, failure and close: nothing depends on timing, nothing hangs."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from engine_models import assert_logprobs, generate_all, own_greedy, prompt, tiny

from stepladder.engines.engine import Engine, Session
from stepladder.engines.local.engine import LocalEngine
from stepladder.engines.scripted import ScriptedEngine
from stepladder.errors import ConfigError, EngineError, InvariantError
from stepladder.types import Generation, Sampling


def run(coroutine):
    """Nothing here may take long: a hang is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def episodes(engine: LocalEngine, jitter: random.Random) -> list[list[Generation]]:
    """Nine three-turn episodes of three tasks; every one dawdles at random before each turn."""
    sessions = [engine.session(f"{i:02d}") for i in range(9)]

    async def one(i: int) -> list[Generation]:
        with sessions[i] as session:
            ids, outs = prompt(10 + 7 * (i // 3), i // 3), []
            for turn in range(3):
                await asyncio.sleep(jitter.random() * 0.02)
                out = await session.generate(ids, Sampling(max_tokens=3 + i % 4, seed=100 * i + turn))
                outs.append(out)
                ids = [*ids, *out.token_ids, *prompt(4, turn)]
            return outs

    order = list(range(9))
    jitter.shuffle(order)
    found = dict(zip(order, await asyncio.gather(*(one(i) for i in order)), strict=True))
    return [found[i] for i in range(9)]


def test_exact_mode_gives_the_same_bits_whatever_the_timing() -> None:
    model = tiny("llama")

    async def main(seed: int, max_rows: int) -> list[list[Generation]]:
        engine = LocalEngine(model, exact=True, max_rows=max_rows)
        jitter = random.Random(seed)
        first = await episodes(engine, jitter)
        second = await episodes(engine, jitter)  # nothing of the first batch may show in the second
        await engine.close()
        assert first == second
        return first

    assert run(main(1, 128)) == run(main(2, 128))
    assert run(main(3, 4)) == run(main(4, 4))


def test_exact_mode_waits_for_open_sessions_only() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model, exact=True)
        one, two = engine.session("1"), engine.session("2")
        task = asyncio.create_task(one.generate(prompt(5, 1), Sampling(max_tokens=3)))
        await asyncio.sleep(0.1)
        assert not task.done()
        two.close()
        assert len((await task).token_ids) == 3
        one.close()
        await engine.close()

    run(main())


def test_cancelling_frees_the_slot() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model, max_rows=1)
        long = Sampling(temperature=0.0, max_tokens=240)
        one, two, three = (engine.session(str(i)) for i in range(3))
        first = asyncio.create_task(one.generate(prompt(5, 1), long))
        second = asyncio.create_task(two.generate(prompt(5, 2), long))
        await until(lambda: engine.stats().generated > 0)
        second.cancel()  # still waiting for the only row
        first.cancel()  # in the row
        out = await three.generate(prompt(6, 3), Sampling(temperature=0.0, max_tokens=4))
        assert list(out.token_ids) == own_greedy(model, prompt(6, 3), 4)
        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await task
        again = await one.generate(prompt(5, 1), Sampling(temperature=0.0, max_tokens=4))
        assert list(again.token_ids) == own_greedy(model, prompt(5, 1), 4)
        await engine.close()

    run(main())


def test_cancelling_one_sibling_leaves_the_others_alone() -> None:
    model = tiny("llama")
    ids = prompt(9, 1)

    async def main() -> None:
        engine = LocalEngine(model)
        sessions = [engine.session(str(i)) for i in range(3)]
        tasks = [
            asyncio.create_task(s.generate(ids, Sampling(temperature=0.0, max_tokens=100))) for s in sessions
        ]
        await until(lambda: engine.stats().generated > 0)
        sessions[1].close()
        with pytest.raises(EngineError, match="closed while generating"):
            await tasks[1]
        for i in (0, 2):
            assert_logprobs(model, ids, await tasks[i], within=2e-4)
        await engine.close()

    run(main())


def test_a_failure_in_the_compute_thread_reaches_every_waiter_with_its_traceback() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model, fused=False)
        sessions = [engine.session(str(i)) for i in range(3)]
        tasks = [
            asyncio.create_task(s.generate(prompt(5 + i, i), Sampling(max_tokens=200)))
            for i, s in enumerate(sessions)
        ]
        await until(lambda: engine.stats().generated > 0)

        def broken(*args: object, **kwargs: object) -> None:
            raise ZeroDivisionError("a bug in the model")

        model.model.layers[1].forward = broken
        for task in tasks:
            with pytest.raises(InvariantError, match="ZeroDivisionError: a bug in the model") as caught:
                await task
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert caught.value.__cause__.__traceback__ is not None
        with pytest.raises(InvariantError, match="a bug in the model"):
            await sessions[0].generate(prompt(5, 1), Sampling())
        with pytest.raises(InvariantError, match="a bug in the model"):
            engine.sync(1)
        for session in sessions:
            session.close()
        await engine.close()

    run(main())


def test_broken_weights_end_the_run_instead_of_sampling_rubbish() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model)
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")
        engine.sync(1)
        with pytest.raises(InvariantError, match="weights are broken"):
            await generate_all(engine, [prompt(5, 1)], [Sampling()])
        await engine.close()

    run(main())


def test_close_ends_the_thread_and_tells_who_waits() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model)
        session = engine.session("a")
        task = asyncio.create_task(session.generate(prompt(5, 1), Sampling(max_tokens=250)))
        await until(lambda: engine.stats().generated > 0)
        await engine.close()
        with pytest.raises(EngineError, match="engine is closed"):
            await task
        with pytest.raises(EngineError, match="engine is closed"):
            engine.session("b")
        with pytest.raises(EngineError, match="engine is closed"):
            await session.generate(prompt(5, 1), Sampling())
        session.close()
        await engine.close()

    run(main())


def test_nothing_is_left_behind() -> None:
    """Finished, cancelled and closed sessions: no request, no row and no cached byte stays."""
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model)
        for i in range(20):
            session = engine.session(str(i))
            task = asyncio.create_task(session.generate(prompt(5, i), Sampling(max_tokens=5, seed=i)))
            for _ in range(i % 7):
                await asyncio.sleep(0.001)
            if i % 3 == 0:
                task.cancel()
            elif i % 3 == 1:
                await task
            session.close()
            await asyncio.gather(task, return_exceptions=True)
        scheduler = engine._scheduler
        await until(lambda: not scheduler.busy)
        engine.stats()  # commands before this one are done
        assert (scheduler.prefixes.bytes, engine._pending, engine._waiting) == (0, set(), {})
        await engine.close()

    run(main())


def test_one_generate_at_a_time_and_none_after_close() -> None:
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model)
        assert isinstance(engine, Engine)
        session = engine.session("a")
        assert isinstance(session, Session)
        task = asyncio.create_task(session.generate(prompt(5, 1), Sampling(max_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="one generate at a time"):
            await session.generate(prompt(5, 1), Sampling())
        await task
        session.close()
        session.close()
        with pytest.raises(EngineError, match="closed"):
            await session.generate(prompt(5, 1), Sampling())
        await engine.close()

    run(main())


def test_the_event_loop_is_never_blocked() -> None:
    """A tick every 5 ms goes on while a step takes 100."""
    model = tiny("llama")

    async def main() -> None:
        engine = LocalEngine(model, fused=False)
        inner = model.model.layers[0].forward

        def slow(*args, **kwargs):
            threading_sleep(0.1)
            return inner(*args, **kwargs)

        from time import monotonic
        from time import sleep as threading_sleep

        model.model.layers[0].forward = slow
        with engine.session("a") as session:
            task = asyncio.create_task(session.generate(prompt(5, 1), Sampling(max_tokens=5)))
            ticks, start = 0, monotonic()
            while not task.done():
                await asyncio.sleep(0.005)
                ticks += 1
            assert monotonic() - start >= 0.5
            assert ticks >= 20
        await engine.close()

    run(main())


def test_an_engine_serves_one_event_loop_after_another() -> None:
    model = tiny("llama")
    engine = LocalEngine(model)
    sampling = Sampling(temperature=0.0, max_tokens=4)
    outs = [run(generate_all(engine, [prompt(5, 1)], [sampling])) for _ in range(2)]
    assert outs[0] == outs[1]

    async def abandoned() -> None:
        asyncio.get_running_loop().create_task(
            engine.session("x").generate(prompt(5, 2), Sampling(max_tokens=250))
        )
        await asyncio.sleep(0)

    asyncio.run(abandoned())
    assert run(generate_all(engine, [prompt(5, 1)], [sampling])) == outs[0]
    run(engine.close())


def test_scripted_engine() -> None:
    async def main() -> None:
        engine = ScriptedEngine({"a": [[5, 2, 9], [7, 7, 7], EngineError("gone")]}, logprob=-0.5)
        assert isinstance(engine, Engine)
        with engine.session("a") as session:
            assert isinstance(session, Session)
            out = await session.generate([1], Sampling(stop_token_ids=(2,)))
            assert out == Generation((5, 2), (-0.5, -0.5), ((0, 2),), "stop")
            engine.version = 3
            out = await session.generate([1, 5, 2], Sampling(max_tokens=2))
            assert out == Generation((7, 7), (-0.5, -0.5), ((3, 2),), "length")
            with pytest.raises(EngineError, match="gone"):
                await session.generate([1], Sampling())
            with pytest.raises(EngineError, match="3 turns for session 'a'; turn 3"):
                await session.generate([1], Sampling())
        with pytest.raises(EngineError, match="closed"):
            await session.generate([1], Sampling())
        assert [request.prompt_ids for request in engine.requests][:2] == [(1,), (1, 5, 2)]
        assert engine.open_sessions == 0
        await engine.close()

    run(main())
