"""Streamed requests under way: cut by a weight sync, given up when the server says nothing any more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from stepladder.engines.vllm.control import Control
from stepladder.engines.vllm.wire import Draw
from stepladder.errors import ConfigError, EngineError

_CLOSING = 5.0  # seconds that closing a connection may take


class _Flight:
    """One request and the task that reads its stream."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task, self.loop = task, task.get_loop()
        self.cut = False

    def ground(self) -> None:
        self.cut = True
        # As a timer, which runs after the sockets that are ready: anyio would set the result of the future
        # just cancelled, and asyncio report that as an error.
        self.loop.call_soon_threadsafe(lambda: self.loop.call_later(0, self.task.cancel))


class Flights:
    """All requests under way. `grounded` waits until there is none and lets none begin meanwhile.

    `deadline`: seconds without a token for anybody before those who wait give up. A request that waits in
    the server's queue while others get tokens is not given up.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._landed = threading.Condition()
        self._flying: set[_Flight] = set()
        self._syncing = False
        self._heard = 0.0
        self._seconds, self._since = 0.0, 0.0

    async def fly(
        self, control: Control, body: dict[str, Any], draw: Draw, version: Callable[[], int]
    ) -> int:
        """Stream `body` into `draw` until its end or a sync; returns the version that sampled.

        Raises:
            EngineError: the server failed, died or fell silent.
        """
        while True:
            with self._landed:
                if not self._syncing:
                    sampled_by = version()
                    flight = _Flight(asyncio.ensure_future(self._read(control, body, draw)))
                    self._take_off(flight)
                    break
            await asyncio.sleep(0.01)  # a sync lasts longer, and ends in another thread
        try:
            await self._watch(flight)
        finally:
            flight.task.cancel()
            await asyncio.wait({flight.task}, timeout=_CLOSING)  # the server sees that nobody listens
            with self._landed:
                self._land(flight)
        return sampled_by

    async def _watch(self, flight: _Flight) -> None:
        began = time.monotonic()
        while not flight.task.done():
            patience = max(self._heard, began) + self.deadline - time.monotonic()
            if patience <= 0:
                raise EngineError(
                    f"the vLLM server has sent nothing for {self.deadline:g} s; it hangs, or is given too "
                    "little time for a prompt this long (engine.deadline)"
                )
            await asyncio.wait({flight.task}, timeout=patience)
        try:
            flight.task.result()
        except asyncio.CancelledError:
            if not flight.cut:
                raise EngineError("the engine was closed while generating") from None

    async def _read(self, control: Control, body: dict[str, Any], draw: Draw) -> None:
        async for line in control.stream(body):
            if draw.feed(line):
                self._heard = time.monotonic()
        if not draw.ended:
            raise EngineError(
                f"the server's answer broke off after {len(draw.ids)} of {draw.sampling.max_tokens} tokens"
            )

    @contextlib.contextmanager
    def grounded(self) -> Iterator[None]:
        """Cut what is under way, and hold back what would begin, for as long as the block lasts."""
        with self._landed:
            self._refuse_own_loop()
            self._syncing = True
            for flight in self._flying:
                flight.ground()
            try:
                if not self._landed.wait_for(lambda: not self._flying, timeout=self.deadline):
                    raise EngineError(
                        f"{len(self._flying)} generations did not end within {self.deadline:g} s of a sync; "
                        "their event loop is blocked"
                    )
            except BaseException:
                self._syncing = False
                raise
        try:
            yield
        finally:
            with self._landed:
                self._syncing = False

    def _refuse_own_loop(self) -> None:
        with contextlib.suppress(RuntimeError):
            here = asyncio.get_running_loop()
            if any(flight.loop is here for flight in self._flying):
                raise ConfigError(
                    "sync was called on the event loop that generates; call it from another thread, such as "
                    "await asyncio.to_thread(engine.sync, version)"
                )

    async def close(self) -> None:
        """Cancel whatever is under way."""
        with self._landed:
            flying = list(self._flying)
        for flight in flying:
            flight.loop.call_soon_threadsafe(flight.task.cancel)
        await asyncio.sleep(0)

    def take_seconds(self) -> float:
        """Seconds with at least one request under way, since the last call."""
        with self._landed:
            now = time.monotonic()
            if self._flying:
                self._seconds += now - self._since
                self._since = now
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _take_off(self, flight: _Flight) -> None:
        if not self._flying:
            self._since = time.monotonic()
        self._flying.add(flight)

    def _land(self, flight: _Flight) -> None:
        self._flying.discard(flight)
        if not self._flying:
            self._seconds += time.monotonic() - self._since
        self._landed.notify_all()
