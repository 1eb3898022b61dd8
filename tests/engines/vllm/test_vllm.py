"""The vLLM engine on a small fake server: what is sent, what is refused, versions across a sync, silence."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import VOCABULARY, FakeVllm, scores
from safetensors.torch import save_file

from stepladder.engines.engine import Engine, PolicyEngine, Session
from stepladder.engines.vllm.control import connect, hash_of_weights
from stepladder.engines.vllm.engine import VllmEngine
from stepladder.errors import ConfigError, EngineError, InvariantError
from stepladder.types import Generation, Sampling

CONTEXT = 64


class Trainer:
    """The policy's side of the fake model: one weight."""

    weight = 0.7

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weight.json").write_text(json.dumps(self.weight))
        save_file({"weight": torch.tensor([self.weight])}, folder / "model.safetensors")

    def scores(self, ids: Any, temperature: float) -> list[float]:
        return scores(self.weight, ids, temperature)


@contextmanager
def running(
    fault: str = "", *, delay: float = 0.0, deadline: float = 10.0
) -> Iterator[tuple[VllmEngine, FakeVllm, Trainer, asyncio.Runner]]:
    """An engine on a fake server that is whole during the handshake and has its fault from then on."""
    trainer = Trainer()
    with FakeVllm(delay=delay) as fake, asyncio.Runner() as runner:
        engine = VllmEngine(
            connect(fake.url, dtype=torch.float32, max_context=CONTEXT, deadline=deadline),
            export=trainer.export,
            scores=trainer.scores,
            vocabulary=VOCABULARY,
            max_context=CONTEXT,
            dtype=torch.float32,
            deadline=deadline,
        )
        fake.model.fault = fault
        try:
            yield engine, fake, trainer, runner
        finally:
            runner.run(engine.close())


async def one(engine: VllmEngine, sampling: Sampling, ids: tuple[int, ...] = (3, 5)) -> Generation:
    with engine.session("a") as session:
        return await session.generate(ids, sampling)


def test_it_is_an_engine_and_its_sessions_are_sessions() -> None:
    with running() as (engine, *_):
        assert isinstance(engine, Engine)
        assert isinstance(engine, PolicyEngine)
        assert isinstance(engine.session("a"), Session)
        assert engine.mismatch < 1e-9  # the fake computes in float64, as its trainer does


def test_ids_go_in_and_come_out_with_the_log_probabilities_of_the_sampling_temperature() -> None:
    with running() as (engine, fake, trainer, runner):
        got = runner.run(one(engine, Sampling(0.5, 12, (), seed=9)))
        assert fake.model.requests[-1]["prompt"] == [3, 5]
        assert len(got.token_ids) == 12
        assert got.finish_reason == "length"
        assert got.versions == ((0, 12),)
        assert got.logprobs == pytest.approx(trainer.scores([5, *got.token_ids], 0.5))
        again = runner.run(one(engine, Sampling(0.5, 12, (), seed=9)))
        other = runner.run(one(engine, Sampling(0.5, 12, (), seed=10)))
        assert again == got
        assert other.token_ids != got.token_ids


def test_the_stop_token_is_kept_with_its_log_probability() -> None:
    with running() as (engine, _, trainer, runner):
        got = runner.run(one(engine, Sampling(1.0, 60, (2, 4), seed=1)))
        assert got.finish_reason == "stop"
        assert got.token_ids[-1] in (2, 4)
        assert not set(got.token_ids[:-1]) & {2, 4}
        assert got.logprobs[-1] == pytest.approx(trainer.scores([5, *got.token_ids], 1.0)[-1])


def test_every_parameter_that_changes_the_distribution_is_sent() -> None:
    """What is left out is filled from the model's generation_config: known from a penalty of 1.05."""
    with running() as (engine, fake, _, runner):
        runner.run(one(engine, Sampling(0.7, 4, (2,), seed=2**63 + 5)))
        body = fake.model.requests[-1]
    neutral = {
        "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": True, "stop": [], "stop_token_ids": [2],
        "add_special_tokens": False, "temperature": 0.7, "max_tokens": 4, "seed": 5,
    }  # fmt: skip
    assert {k: body[k] for k in neutral} == neutral


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", r"1 of 1 sampled tokens came without a usable log-probability \(the first is nan\)"),
        ("none", r"1 of 1 sampled tokens .*the first is None"),
        ("absent", r"1 of 1 sampled tokens .*the first is -9999\.0"),
        ("wrong ids", r"do not belong together"),
        ("cut prompt", r"changed the prompt: 2 ids were sent and 1 used, the first difference at 0"),
        ("own stop", r"ended a turn for the reason 'stop' after 3 of 8 tokens.*--generation-config vllm"),
        ("broken off", r"broke off after 2 of 8 tokens"),
        ("error", r"failed while generating: \{.*EngineCore encountered an issue"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(fault: str, message: str) -> None:
    with running(fault) as (engine, _, _, runner), pytest.raises(EngineError, match=message):
        runner.run(one(engine, Sampling(1.0, 8, (), seed=0)))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raw", r"without the temperature: sampled at 0\.5.*--logprobs-mode processed_logprobs"),
        ("penalty", r"the server changes the distribution \(a penalty, a top-k\)"),
    ],
)
def test_the_handshake_finds_a_server_that_says_something_else(fault: str, message: str) -> None:
    with FakeVllm(fault) as fake, pytest.raises(EngineError, match=message):
        make(fake, Trainer())


def test_the_handshake_finds_other_weights() -> None:
    trainer = Trainer()
    trainer.weight = 0.75
    with FakeVllm() as fake, pytest.raises(EngineError, match="it serves other weights"):
        make(fake, trainer)


def make(fake: FakeVllm, trainer: Trainer) -> VllmEngine:
    return VllmEngine(
        connect(fake.url, dtype=torch.float32, max_context=CONTEXT),
        export=trainer.export,
        scores=trainer.scores,
        vocabulary=VOCABULARY,
        max_context=CONTEXT,
        dtype=torch.float32,
    )


def test_a_sync_loads_the_weights_empties_the_prefix_cache_and_is_proven() -> None:
    with running() as (engine, fake, trainer, _):
        before = engine.weights_fingerprint()
        trainer.weight = 0.9
        assert engine.canary() > 0.01  # the trainer has moved, the server has not
        assert engine.weights_fingerprint() == before
        engine.sync(1)
        assert engine.version == 1
        assert engine.canary() < 1e-9
        assert engine.weights_fingerprint() != before
        # The fake refuses to empty its cache the first time, as vLLM does while a request holds blocks.
        asked = [call for call in fake.model.calls if call in ("/collective_rpc", "/reset_prefix_cache")]
        assert asked == ["/collective_rpc", "/reset_prefix_cache", "/reset_prefix_cache"]


def test_the_fingerprint_sees_what_the_type_of_the_server_keeps(tmp_path: Path) -> None:
    """2⁻¹² more is another float32, and the same bfloat16 (8 bits of mantissa): nothing has moved there."""
    for name, value in {"a": 1.0, "b": 1.0 + 2**-12, "c": 1.5}.items():
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "model.safetensors")
    exact = [hash_of_weights(tmp_path / name, torch.float32) for name in "abc"]
    rounded = [hash_of_weights(tmp_path / name, torch.bfloat16) for name in "abc"]
    assert len(set(exact)) == 3
    assert rounded[0] == rounded[1] != rounded[2]


def test_a_sync_that_does_not_arrive_stops_the_run() -> None:
    with running("deaf") as (engine, _, trainer, _):
        trainer.weight = 0.72
        with pytest.raises(InvariantError, match="the weight sync to version 1 did not arrive"):
            engine.sync(1)
        assert engine.version == 0


def test_a_generation_that_a_sync_cuts_goes_on_with_the_new_weights() -> None:
    """Each token's log-probability is that of the version it carries; nothing is lost or sampled twice."""
    with running(delay=0.02) as (engine, fake, trainer, runner):

        async def cut() -> Generation:
            task = asyncio.ensure_future(one(engine, Sampling(1.0, 40, (), seed=4)))
            while not engine._flights._heard:  # the first tokens are there
                await asyncio.sleep(0.01)
            trainer.weight = 0.9
            await asyncio.to_thread(engine.sync, 1)
            return await task

        got = runner.run(cut())
        (old, first), (new, rest) = got.versions
        assert (old, new, first + rest) == (0, 1, 40)
        assert 0 < first < 40
        ids = [5, *got.token_ids]
        assert got.logprobs[:first] == pytest.approx(scores(0.7, ids, 1.0)[:first])
        assert got.logprobs[first:] == pytest.approx(scores(0.9, ids, 1.0)[first:])
        continued = fake.model.requests[-1]
        assert continued["prompt"] == [3, 5, *got.token_ids[:first]]
        assert continued["max_tokens"] == rest
        assert engine.stats().generated == 40


def test_a_sync_on_the_loop_that_generates_is_refused_instead_of_hanging() -> None:
    with running(delay=0.05) as (engine, _, _, runner):

        async def wrong() -> None:
            task = asyncio.ensure_future(one(engine, Sampling(1.0, 20, (), seed=4)))
            await asyncio.sleep(0.1)
            try:
                with pytest.raises(ConfigError, match="call it from another thread"):
                    engine.sync(1)
            finally:
                task.cancel()

        runner.run(wrong())


def test_a_server_that_hangs_is_given_up_within_the_deadline() -> None:
    with running("hang", deadline=0.5) as (engine, _, _, runner):
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"has sent nothing for 0\.5 s; it hangs"):
            runner.run(one(engine, Sampling(1.0, 8, (), seed=0)))
        assert time.monotonic() - began < 5


def test_waiting_while_others_get_tokens_is_no_hang() -> None:
    """A request in the server's queue for longer than the deadline, behind one that streams."""
    with running(delay=0.05, deadline=0.4) as (engine, fake, _, runner):
        held = threading.Event()
        sample = fake.model.sample

        def slow_for_long_ones(body: dict[str, Any]) -> list[tuple[int, float]]:
            if body["max_tokens"] == 3:
                held.wait(1.2)
            return sample(body)

        fake.model.sample = slow_for_long_ones  # type: ignore[method-assign]

        async def both() -> tuple[Generation, Generation]:
            busy = one(engine, Sampling(1.0, 30, (), seed=0))
            return await asyncio.gather(busy, one(engine, Sampling(1.0, 3, (), seed=1)))

        assert [len(g.token_ids) for g in runner.run(both())] == [30, 3]


def test_closing_a_session_ends_its_request_at_the_server() -> None:
    with running(delay=0.05) as (engine, fake, _, runner):

        async def closed() -> None:
            session = engine.session("gone")
            task = asyncio.ensure_future(session.generate([3], Sampling(1.0, 60, (), seed=0)))
            await asyncio.sleep(0.2)
            session.close()
            with pytest.raises(EngineError, match="'gone' was closed while generating"):
                await task
            with pytest.raises(EngineError, match="is closed; open a new one"):
                await session.generate([3], Sampling())

        runner.run(closed())
        until = time.monotonic() + 5
        while "cut" not in fake.model.calls:
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("ids", "sampling", "error", "message"),
    [
        ([], Sampling(), EngineError, "the prompt is empty"),
        ([1] * 64, Sampling(), EngineError, "has 64 tokens and the context holds 64"),
        ([16], Sampling(), EngineError, r"token id 16 is outside .* 0 \.\. 15"),
        ([1], Sampling(max_tokens=0), ConfigError, "max_tokens must be at least 1"),
        ([1], Sampling(temperature=-1.0), ConfigError, "temperature must be 0"),
        ([1], Sampling(temperature=0.001), ConfigError, r"raises a temperature below 0\.01 to it"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_sent(
    ids: list[int], sampling: Sampling, error: type[Exception], message: str
) -> None:
    with running() as (engine, fake, _, runner):
        sent = len(fake.model.requests)
        with pytest.raises(error, match=message):
            runner.run(one(engine, sampling, tuple(ids)))
        assert len(fake.model.requests) == sent


def test_a_server_without_the_routes_or_the_room_says_what_to_start_it_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeVllm() as fake:
        with pytest.raises(ConfigError, match="start it with --max-model-len 66"):
            connect(fake.url, dtype=torch.float32, max_context=65)
        control = connect(fake.url, dtype=torch.float32, max_context=CONTEXT)
        with pytest.raises(EngineError, match=r"answered 404 to /sleep"):
            control._call("POST", "/sleep")
        control.kill()
    with pytest.raises(EngineError, match=r"did not answer \(ConnectError"):
        connect(fake.url, dtype=torch.float32, max_context=CONTEXT)


def test_a_closed_engine_says_so() -> None:
    with running() as (engine, _, _, runner):
        runner.run(engine.close())
        for use in (engine.session, lambda: engine.sync(1), lambda: engine.token_logprobs([1, 2])):
            with pytest.raises(EngineError, match="the engine is closed"):
                use()
