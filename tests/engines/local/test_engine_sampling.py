"""Stops, limits, seeds, weights: what a request may count on."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_models import (
    assert_greedy,
    assert_logprobs,
    generate_all,
    own_greedy,
    prompt,
    reference_logprobs,
    tiny,
)

from stepladder.engines.local.engine import LocalEngine
from stepladder.errors import ConfigError, EngineError
from stepladder.types import Generation, Sampling


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def once(engine: LocalEngine, ids: list[int], sampling: Sampling) -> Generation:
    return (await generate_all(engine, [ids], [sampling]))[0]


def test_the_stop_token_is_kept() -> None:
    """Known fault 20: the id that stopped the turn is there, last, with its log-probability."""
    model = tiny("llama")
    ids = prompt(10, 1)
    greedy = own_greedy(model, ids, 10)
    stop = greedy[4]
    end = greedy.index(stop) + 1

    async def main() -> None:
        engine = LocalEngine(model)
        out = await once(engine, ids, Sampling(temperature=0.0, max_tokens=10, stop_token_ids=(299, stop)))
        assert out.token_ids == tuple(greedy[:end])
        assert out.finish_reason == "stop"
        assert_logprobs(model, ids, out)
        cut = await once(engine, ids, Sampling(temperature=0.0, max_tokens=end, stop_token_ids=(stop,)))
        assert cut.finish_reason == "stop"  # stopped by itself, at the last token allowed
        await engine.close()

    run(main())


def test_generation_config_is_never_applied() -> None:
    """Known fault 54: penalties and top-k of the model's own settings would bias the ratio."""
    model = tiny("llama")
    ids = prompt(10, 1)
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=5)

    async def outputs() -> Generation:
        engine = LocalEngine(model)
        out = await once(engine, ids, sampling)
        await engine.close()
        return out

    plain = run(outputs())
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    model.generation_config.do_sample = True
    model.generation_config.suppress_tokens = list(plain.token_ids)
    model.generation_config.max_new_tokens = 2
    assert run(outputs()) == plain


def test_the_context_is_a_limit() -> None:
    model = tiny("gpt2")

    async def main() -> None:
        engine = LocalEngine(model, max_context=20)
        out = await once(engine, prompt(15, 1), Sampling(temperature=0.0, max_tokens=50))
        assert (len(out.token_ids), out.finish_reason) == (5, "length")
        with pytest.raises(EngineError, match=r"21 tokens.*holds 20"):
            await once(engine, prompt(21, 1), Sampling())
        with pytest.raises(EngineError, match="empty"):
            await once(engine, [], Sampling())
        with pytest.raises(EngineError, match=r"300.*0 \.\. 299"):
            await once(engine, [5, 300], Sampling())
        with pytest.raises(ConfigError, match="max_tokens"):
            await once(engine, [5], Sampling(max_tokens=0))
        with pytest.raises(ConfigError, match="temperature"):
            await once(engine, [5], Sampling(temperature=-1.0))
        await engine.close()
        with pytest.raises(ConfigError, match="positions for 256"):
            LocalEngine(model, max_context=257)

    run(main())


def test_gpt2_generates_up_to_its_last_position() -> None:
    """Padding of a ragged batch may lie beyond the last position embedding; nothing may index there."""
    model = tiny("gpt2")
    prompts = [prompt(250, 1), prompt(200, 2), prompt(170, 3)]

    async def main() -> None:
        engine = LocalEngine(model)
        await generate_all(engine, [ids[:240] for ids in prompts], [Sampling(max_tokens=1)] * 3)
        outs = await generate_all(engine, prompts, [Sampling(temperature=0.0, max_tokens=100)] * 3)
        assert [len(out.token_ids) for out in outs] == [6, 56, 86]
        for ids, out in zip(prompts, outs, strict=True):
            assert_logprobs(model, ids, out)
        await engine.close()

    run(main())


def test_same_seed_same_tokens_whatever_the_batch() -> None:
    model = tiny("qwen3")
    ids = prompt(10, 1)
    sampling = Sampling(temperature=1.0, max_tokens=20, seed=11)

    async def main() -> None:
        engine = LocalEngine(model)
        alone = await once(engine, ids, sampling)
        others = [prompt(4 + 3 * i, i) for i in range(6)]
        crowd = await generate_all(
            engine,
            [*others, ids, *others],
            [*[Sampling(max_tokens=9, seed=i) for i in range(6)], sampling] * 2,
        )
        assert crowd[6].token_ids == alone.token_ids
        assert crowd[6].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        await engine.close()

    run(main())


def test_siblings_with_different_seeds_differ() -> None:
    """Known fault 99: G = 8 siblings of one prompt; more than one completion, the same on a rerun."""
    model = tiny("llama")
    samplings = [Sampling(temperature=1.0, max_tokens=12, seed=seed) for seed in range(8)]

    async def main() -> list[Generation]:
        engine = LocalEngine(model)
        outs = await generate_all(engine, [prompt(9, 1)] * 8, samplings)
        same = await generate_all(engine, [prompt(9, 1)] * 4, [samplings[0]] * 4)
        assert {out.token_ids for out in same} == {outs[0].token_ids}
        await engine.close()
        return outs

    outs = run(main())
    assert len({out.token_ids for out in outs}) >= 4
    assert [out.token_ids for out in run(main())] == [out.token_ids for out in outs]


def test_sync_shows_the_new_weights_and_no_stale_cache() -> None:
    """Known faults 58 and 59: after an update, prefixes, parked turns and the head are the new weights'."""
    model = tiny("llama")
    ids = prompt(40, 1)
    sampling = Sampling(temperature=0.0, max_tokens=8)

    async def main() -> None:
        engine = LocalEngine(model)
        session = engine.session("a")
        before = await session.generate(ids, sampling)
        assert_logprobs(model, ids, before)
        fingerprint = engine.weights_fingerprint()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.sync(7)
        assert engine.version == 7
        assert engine.weights_fingerprint() != fingerprint
        longer = [*ids, *before.token_ids, 5, 6]
        for request in (ids, longer):
            out = await session.generate(request, sampling)
            assert out.versions == ((7, 8),)
            assert_greedy(model, request, out, 8)
        scores, fingerprint = engine.token_logprobs(longer), engine.weights_fingerprint()
        with torch.no_grad():
            model.lm_head.weight[longer[3], 3] += 1.0  # one element of the head
        engine.sync(8)
        assert engine.token_logprobs(longer)[2] != scores[2]
        assert engine.weights_fingerprint() != fingerprint
        session.close()
        await engine.close()

    run(main())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sync_in_mid_generation_marks_the_tokens(recompute: bool) -> None:
    """A turn may span an update: its versions say so, and its cache of two versions is never kept."""
    model = tiny("llama")
    ids = prompt(20, 1)

    async def main() -> None:
        engine = LocalEngine(model, recompute_live=recompute)
        session = engine.session("a")
        task = asyncio.create_task(session.generate(ids, Sampling(temperature=0.0, max_tokens=200)))
        while engine.stats().generated == 0:
            await asyncio.sleep(0.001)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
        engine.sync(1)
        out = await task
        (first, count), (second, rest) = out.versions
        assert (first, second, count + rest) == (0, 1, 200)
        if recompute:  # what was sampled after the update is what the new weights alone would give
            done = [*ids, *out.token_ids[:count]]
            tail = Generation(out.token_ids[count:], out.logprobs[count:], ((1, rest),), "length")
            assert_greedy(model, done, tail, rest)
        longer = [*ids, *out.token_ids, 9]
        engine.stats()
        again = await session.generate(longer, Sampling(temperature=0.0, max_tokens=4))
        assert_logprobs(model, longer, again)
        assert engine.stats().prefill_computed >= (2 if recompute else len(longer))
        await engine.close()

    run(main())


def test_a_policy_in_training_mode_is_run_without_dropout_and_left_in_training_mode() -> None:
    model = tiny("gpt2")
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    ids = prompt(10, 1)
    model.transformer.h[1].eval()

    async def main() -> Generation:
        engine = LocalEngine(model)
        out = await once(engine, ids, Sampling(temperature=0.0, max_tokens=8))
        await engine.close()
        return out

    out = run(main())
    assert model.training
    assert model.transformer.h[0].training
    assert not model.transformer.h[1].training
    model.eval()
    assert_logprobs(model, ids, out)


def test_another_type_is_a_copy_that_follows_the_policy() -> None:
    model = tiny("llama")
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    ids = prompt(10, 1)

    async def main() -> None:
        engine = LocalEngine(model, dtype="bfloat16")
        own = reference_logprobs(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        got = torch.tensor(engine.token_logprobs(ids))
        assert 1e-5 < (got - own).abs().mean() < 0.2
        with torch.no_grad():
            model.model.norm.weight.mul_(0.0)
        engine.sync(1)
        uniform = -torch.log(torch.tensor(300.0))
        torch.testing.assert_close(
            torch.tensor(engine.token_logprobs(ids)), uniform.expand(9), rtol=0, atol=1e-2
        )
        await engine.close()

    run(main())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    changed = [name for name, p in model.state_dict().items() if not torch.equal(p, weights[name])]
    assert changed == ["model.norm.weight"]
