"""Decode graphs without a card: a stand-in for the recorder replays on the recorded tensors alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import assert_greedy, generate_all, prompt, tiny
from torch import Tensor

import stepladder.engines.local.fused as fused_module
from stepladder.engines.local.engine import LocalEngine
from stepladder.engines.local.fused import FusedForward
from stepladder.engines.local.graphs import DecodeGraphs
from stepladder.engines.local.packing import PlainLinear
from stepladder.types import Sampling


class Recorder:
    """What a `CudaRecorder` does, in Python: each replay computes again from the tensors of the recording;
    weights and cache must lie where they lay then."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0
        self.forward: Any = None

    def _memory(self) -> list[int]:
        weights = [layer.out.weight for layer in self.forward.layers if not layer.out.copies]
        return [t.data_ptr() for t in (self.forward.store.kv, self.forward.embedding, *weights)]

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.recordings += 1
        out = torch.zeros_like(compute())
        memory = self._memory()

        def replay() -> None:
            assert memory == self._memory()
            self.replays += 1
            out.copy_(compute())

        return replay, out


def engine_with(
    record: Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]], model: Any
) -> LocalEngine:
    engine = LocalEngine(model, fused=True)
    forward: Any = engine._path.forward
    forward.graphs = DecodeGraphs(forward, record)
    if isinstance(record, Recorder):
        record.forward = forward
    return engine


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_ragged_rows_through_graphs(kind: str) -> None:
    """Rows end at different times, contexts grow over a bucket, and a second batch finds graphs made."""
    model, record = tiny(kind), Recorder()
    prompts = [prompt(n, seed) for seed, n in enumerate((3, 9, 30, 1, 40, 7))]
    samplings = [Sampling(temperature=0.0, max_tokens=n) for n in (12, 3, 12, 40, 7, 12)]

    async def main() -> None:
        engine = engine_with(record, model)
        for again in range(2):
            outs = await generate_all(engine, prompts, samplings)
            for ids, sampling, out in zip(prompts, samplings, outs, strict=True):
                assert_greedy(model, ids, out, sampling.max_tokens)
            if not again:
                made = record.recordings
        assert made == record.recordings  # none the second time
        assert 3 <= made <= 12
        assert record.replays > 60
        await engine.close()

    asyncio.run(main())


def test_new_weights_are_seen_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads weights at fixed addresses, so a refresh writes the new ones where the old ones lay."""
    monkeypatch.setattr(fused_module, "linear_class", lambda device, dtype: PlainLinear)
    model = tiny("qwen3")

    def tensors(forward: FusedForward) -> list[Tensor]:
        found = [forward.embedding, forward.norm, forward.head.weight]  # type: ignore[attr-defined]
        for layer in forward.layers:
            linears: list[Any] = [layer.qkv, layer.out, layer.gate, layer.up, layer.down]
            found += [layer.input_norm, layer.mlp_norm, *(linear.weight for linear in linears)]
            found += [linear.bias for linear in linears if linear.bias is not None]
            found += [] if layer.head_norm is None else [layer.head_norm]
        return found

    async def main() -> None:
        engine = engine_with(Recorder(), model)
        engine.sync(1)
        ids, greedy = prompt(9, 3), Sampling(temperature=0.0, max_tokens=10)
        await generate_all(engine, [ids], [greedy])
        forward: Any = engine._path.forward
        before = [t.data_ptr() for t in tensors(forward)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.sync(2)
        assert [t.data_ptr() for t in tensors(forward)] == before
        (out,) = await generate_all(engine, [ids], [greedy])
        assert_greedy(model, ids, out, 10)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["raises", "wrong", "nothing"])
def test_graphs_that_fail_are_not_used(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    tried = []

    def record(compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        tried.append(fault)
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        out = compute()
        if fault == "nothing":  # as a graph that recorded no kernel
            return lambda: None, out
        return lambda: out.copy_(compute() + 1.0), out

    async def main() -> None:
        engine = engine_with(record, model)
        ids = prompt(9, 3)
        with caplog.at_level(logging.WARNING):
            (out,) = await generate_all(engine, [ids], [Sampling(temperature=0.0, max_tokens=10)])
        assert_greedy(model, ids, out, 10)
        await engine.close()

    asyncio.run(main())
    assert len(tried) == 1
    assert "CUDA graphs are off" in caplog.text
