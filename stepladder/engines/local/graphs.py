"""Decode passes as CUDA graphs: one launch instead of some hundred, for a card waits for Python otherwise.

A graph replays fixed kernels on fixed memory, so there is one for each (rows, positions read) that occurs,
both rounded up; inputs are copied to where it expects them. They are proven on their first inputs and, where
recording fails or gives something else, not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stepladder.engines.local.cache import SlotCache, bucketed
from stepladder.engines.local.layout import PassLayout
from stepladder.engines.local.packing import UNSUPPORTED

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # rows; more are rounded up to a multiple of the last
MOST = 96  # graphs; the one made first goes when another is wanted
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]


class CudaRecorder:
    """Records functions of tensor operations on one CUDA device; all graphs share one pool of memory, for
    they are replayed one after the other. Other threads may use the device meanwhile.

    Source: torch.cuda.graphs, the example of its documentation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """(replay, the tensor that each replay writes)."""
        with torch.cuda.device(self.device):  # streams and graphs belong to the current one
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            before = torch.cuda.current_stream()
            try:
                self._stream.wait_stream(before)
                with torch.cuda.stream(self._stream):  # libraries make their workspaces outside the graph
                    for _ in range(2):
                        compute()
                before.wait_stream(self._stream)
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    out = compute()
            finally:  # a capture that broke off may leave its own stream behind
                torch.cuda.set_stream(before)

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay, out


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph with the tensors that it reads and the one that it writes."""

    ids: Tensor
    layout: PassLayout
    replay: Callable[[], Any]
    out: Tensor


class Recordable(Protocol):
    """What is recorded: `engines.local.fused.FusedForward`, as far as it is needed here."""

    store: SlotCache
    device: torch.device
    embedding: Tensor

    def layout(self, counts: Sequence[int], starts: Sequence[int], rest: int) -> PassLayout: ...

    def compute(self, ids: Tensor, layout: PassLayout, last: Tensor | None) -> Tensor: ...


class DecodeGraphs:
    """Passes of one new token a row, for a `FusedForward`; `record`: a `CudaRecorder`, or a stand-in."""

    def __init__(self, forward: Recordable, record: Recorder) -> None:
        self.forward, self.record = forward, record
        forward.store.tight = False
        self._made: dict[tuple[int, int], Recorded] = {}
        self._where: tuple[int, torch.Size] | None = None  # the cache's memory, which graphs point into
        self.off = False

    def clear(self) -> None:
        """Forget all graphs."""
        self._made = {}

    def run(self, tokens: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Logits [rows, V] of the slots from 0 on; they stand until the next pass."""
        count = len(tokens)
        size = next((size for size in SIZES if size >= count), -(-count // SIZES[-1]) * SIZES[-1])
        filling = [0] * (size - count)  # rows of nobody, in the slots after the live ones
        store = self.forward.store
        store.reserve(size, bucketed(max(starts) + 1))
        layout = self.forward.layout([1] * size, [*starts, *filling], 0)
        rest = [0] * (layout.filled - size)
        ids = torch.tensor([*tokens, *filling, *rest], device=self.forward.device)
        read = layout.spans[0].read
        if self.off or layout.spans[0].mask is None:  # a single row that fills its bucket
            return self.forward.compute(ids, layout, None)[:count]
        where = (store.kv.data_ptr(), store.kv.shape)
        if where != self._where:
            self._made, self._where = {}, where
        made = self._made.get((size, read))
        if made is None:
            made = self._prove(ids.clone(), layout)
            if made is None:
                return self.forward.compute(ids, layout, None)[:count]
            if len(self._made) >= MOST:
                del self._made[next(iter(self._made))]
            self._made[size, read] = made
        for mine, theirs in _inputs(made.ids, made.layout, ids, layout):
            mine.copy_(theirs)
        made.replay()
        return made.out[:count]

    def _prove(self, ids: Tensor, layout: PassLayout) -> Recorded | None:
        """Record a pass with these inputs, which it owns from then on. It is proven on other tokens than it
        was recorded with; None, and no graphs from now on, where it goes wrong."""
        other = (ids + 1) % len(self.forward.embedding)
        expected = self.forward.compute(other, layout, None)
        try:
            replay, out = self.record(lambda: self.forward.compute(ids, layout, None))
            ids.copy_(other)
            out.fill_(float("nan"))
            replay()
        except UNSUPPORTED as error:
            log.warning("CUDA graphs are off: recording one failed (%s: %s)", type(error).__name__, error)
            self.off = True
            return None
        spread = float(expected.float().std())
        if not float((out - expected).abs().max()) <= 0.05 * spread:
            log.warning("CUDA graphs are off: a replay gave other logits than the pass it recorded")
            self.off = True
            return None
        return Recorded(ids, layout, replay, out)


def _inputs(ids: Tensor, layout: PassLayout, new_ids: Tensor, new: PassLayout) -> list[tuple[Tensor, Tensor]]:
    """(where a graph reads, what it shall read)."""
    own, theirs = layout.spans[0], new.spans[0]
    pairs = [
        (ids, new_ids),
        (layout.cos, new.cos),
        (layout.sin, new.sin),
        (layout.where, new.where),
        (own.mask, theirs.mask),
        (own.by_head, theirs.by_head),
    ]
    return [(mine, other) for mine, other in pairs if mine is not None and other is not None]
