"""The engine against transformers: the same greedy ids, the same log-probabilities."""

from __future__ import annotations

import asyncio

import pytest
from engine_models import CASES, assert_greedy, assert_logprobs, generate_all, own_greedy, prompt, tiny

from stepladder.engines.local.engine import LocalEngine
from stepladder.types import Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_ragged_batch(kind: str, fused: bool) -> None:
    model = tiny(kind)
    prompts = [prompt(n, seed) for seed, n in enumerate((3, 9, 20, 1, 40, 7))]

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        outs = await generate_all(engine, prompts, [GREEDY] * len(prompts))
        for ids, out in zip(prompts, outs, strict=True):
            assert list(out.token_ids) == own_greedy(model, ids, 12)
            assert out.finish_reason == "length"
            assert_logprobs(model, ids, out)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_refilled_rows_and_small_prefill_batches(kind: str, fused: bool) -> None:
    """More requests than rows, prompts longer than a prefill batch: rows are refilled as others end."""
    model = tiny(kind)
    prompts = [prompt(5 + 6 * (seed % 5), seed) for seed in range(11)]
    samplings = [Sampling(temperature=0.0, max_tokens=1 + 3 * (i % 4)) for i in range(11)]

    async def main() -> None:
        engine = LocalEngine(model, fused=fused, max_rows=3, prefill_tokens=16)
        outs = await generate_all(engine, prompts, samplings)
        for ids, sampling, out in zip(prompts, samplings, outs, strict=True):
            assert_greedy(model, ids, out, sampling.max_tokens)
        assert engine.stats().rows_per_step <= 3
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_shared_prefix_is_computed_once(kind: str, fused: bool) -> None:
    model = tiny(kind)
    system, other = prompt(40, 1), prompt(24, 2)
    prompts = [system + prompt(4 + i, 10 + i) for i in range(4)] + [
        other + prompt(5, 20 + i) for i in range(3)
    ]

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        for _ in range(2):  # the second time, both prefixes come from the cache
            outs = await generate_all(engine, prompts, [GREEDY] * len(prompts))
            for ids, out in zip(prompts, outs, strict=True):
                assert_greedy(model, ids, out, 12)
            stats = engine.stats()
            tails = 4 + 5 + 6 + 7 + 3 * 5
            assert stats.prefill_computed <= 40 + 24 + tails
            assert stats.prefill_saved >= 3 * 40 + 2 * 24
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_multi_turn_continuation_computes_only_the_delta(kind: str, fused: bool) -> None:
    model = tiny(kind)
    stop = own_greedy(model, prompt(30, 3), 6)[-1]
    sampling = Sampling(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        with engine.session("a") as session:
            ids = prompt(30, 3)
            for turn in range(4):
                out = await session.generate(ids, sampling)
                assert list(out.token_ids) == own_greedy(model, ids, 20, stop)
                assert_logprobs(model, ids, out)
                computed = engine.stats().prefill_computed
                assert computed == (30 if turn == 0 else 8)  # 7 new ids and the last sampled one
                ids = [*ids, *out.token_ids, *prompt(7, 50 + turn)]
        await engine.close()

    asyncio.run(main())


def test_a_continuation_that_rewrites_history_is_computed_from_where_it_differs() -> None:
    model, fused = tiny("llama"), True

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        with engine.session("a") as session:
            ids = prompt(30, 3)
            out = await session.generate(ids, GREEDY)
            engine.stats()
            edited = [*ids[:20], 7, *ids[21:], *out.token_ids, 9]
            again = await session.generate(edited, GREEDY)
            assert_greedy(model, edited, again, 12)
            assert engine.stats().prefill_computed == len(edited) - 20
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_siblings_share_a_row_then_fork(kind: str, fused: bool) -> None:
    model = tiny(kind)
    ids = prompt(25, 5)
    samplings = [Sampling(temperature=0.7, max_tokens=15, seed=seed) for seed in range(8)]
    samplings += [Sampling(temperature=0.0, max_tokens=15), Sampling(temperature=1.3, max_tokens=9, seed=3)]

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        outs = await generate_all(engine, [ids] * 10, samplings)
        for sampling, out in zip(samplings, outs, strict=True):
            assert len(out.token_ids) == sampling.max_tokens
            assert_logprobs(model, ids, out, sampling.temperature)
        assert list(outs[8].token_ids) == own_greedy(model, ids, 15)
        assert len({out.token_ids for out in outs}) > 2
        stats = engine.stats()
        assert stats.prefill_computed == 25
        assert stats.row_steps < stats.generated
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), CASES)
def test_equal_siblings_share_a_row_again_after_a_tool_result(kind: str, fused: bool) -> None:
    model = tiny(kind)
    ids = prompt(12, 8)

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        sessions = [engine.session(str(i)) for i in range(4)]
        first = await asyncio.gather(*(s.generate(ids, GREEDY) for s in sessions))
        stats = engine.stats()
        assert stats.rows_per_step == 1.0
        longer = [*ids, *first[0].token_ids, *prompt(5, 9)]
        second = await asyncio.gather(*(s.generate(longer, GREEDY) for s in sessions))
        stats = engine.stats()
        assert stats.rows_per_step == 1.0
        assert stats.prefill_computed == 6
        for out in second:
            assert_greedy(model, longer, out, 12)
        await engine.close()

    asyncio.run(main())


def test_a_late_sibling_takes_its_prompt_from_a_live_row() -> None:
    model, fused = tiny("llama"), True
    ids = prompt(30, 4)

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        one, two = engine.session("1"), engine.session("2")
        early = asyncio.create_task(one.generate(ids, Sampling(temperature=0.0, max_tokens=150)))
        while engine.stats().generated == 0:
            await asyncio.sleep(0.001)
        late = await two.generate(ids, GREEDY)
        assert not early.done()
        assert engine.stats().prefill_computed == 1
        assert_greedy(model, ids, late, 12)
        assert_logprobs(model, ids, await early, within=2e-4)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), [("llama", True), ("llama", False), ("gpt2", False)])
def test_padding_never_shows(kind: str, fused: bool) -> None:
    """Known fault 62: lengths 3 and 9 in a batch, against each alone, within 1e-5."""
    model = tiny(kind)
    prompts = [prompt(3, 1), prompt(9, 2)]

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        together = await generate_all(engine, prompts, [GREEDY] * 2)
        engine.drop_prefixes()
        for ids, out in zip(prompts, together, strict=True):
            (alone,) = await generate_all(engine, [ids], [GREEDY])
            assert alone.token_ids == out.token_ids
            assert alone.logprobs == pytest.approx(out.logprobs, abs=1e-5)
            assert_logprobs(model, ids, out, within=1e-5)
            engine.drop_prefixes()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "fused"), [("llama", True), ("llama", False), ("gpt2", False)])
def test_an_engine_that_rested_goes_on_as_before(kind: str, fused: bool) -> None:
    """Caches and prefixes are gone while nothing is under way, and only then; the tokens stay the same, in
    a session that goes on too. A cancelled request keeps nothing."""
    model = tiny(kind)
    ids = prompt(20, 1)

    async def main() -> None:
        engine = LocalEngine(model, fused=fused)
        scheduler = engine._scheduler
        session = engine.session()
        before = await session.generate(ids, GREEDY)
        assert scheduler.prefixes.bytes > 0
        engine.rest()
        assert scheduler.prefixes.bytes == 0
        assert scheduler.store.kv.numel() == 0  # type: ignore[union-attr]
        longer = [*ids, *before.token_ids]
        assert_greedy(model, longer, await session.generate(longer, GREEDY), 12)
        under_way = asyncio.ensure_future(session.generate(ids, GREEDY))
        while not scheduler.rows:
            await asyncio.sleep(0)
        engine.rest()
        assert (await under_way).token_ids == before.token_ids
        cancelled = asyncio.ensure_future(session.generate(ids, Sampling(0.0, 200)))
        while not scheduler.rows:
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.rest()
        assert not scheduler.rows
        assert scheduler.store.kv.numel() == 0  # type: ignore[union-attr]
        await engine.close()

    asyncio.run(main())
