"""The one event loop of a run, on a thread of its own: compute never blocks the world.

While the main thread is in a backward pass of ten seconds, sockets are read, tools answer and their
deadlines are measured. The main thread keeps the signals, so that Ctrl-C means the same everywhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from stepladder.deadlines import DaemonExecutor
from stepladder.threads import release_team

T = TypeVar("T")
SOMEBODY = "code that is not stepladder's (an environment, a library it uses)"


class LoopThread:
    """A thread with a running event loop; `run` gives any other thread the result of a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor())
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="stepladder-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # asyncio leaves the loop when a task ends by SystemExit or KeyboardInterrupt: some library
            # called sys.exit(). Who awaits that task is told; a dead loop would hang everybody else.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and return its result.

        Where waiting is interrupted (Ctrl-C), the coroutine is cancelled and has cleaned up before the
        interruption goes on. Raises RuntimeError where something else cancelled it.
        """
        future = self.start(work)
        release_team()  # this thread waits, and the engine's computes
        try:
            # In slices: a signal that the system hands to another thread wakes no wait of this one.
            while not future.done():
                concurrent.futures.wait([future], timeout=0.5)
            return future.result()
        except asyncio.CancelledError:
            name = getattr(work, "__qualname__", "the work")
            raise RuntimeError(f"{SOMEBODY} cancelled {name}() of this run") from None
        except BaseException:
            if not future.done():
                self._cancel(future)
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin `work` on the loop and return at once."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the event loop of this run is closed; nothing can be awaited any more")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._begin, work, done)
        return done

    def call(self, work: Callable[[], T]) -> T:
        """Run a plain function on the loop's thread, between two ticks, and return its result."""

        async def once() -> T:
            return work()

        return self.run(once())

    def _begin(self, work: Coroutine[Any, Any, T], done: concurrent.futures.Future[T]) -> None:
        task = self._loop.create_task(work)
        done._stepladder_task = task  # type: ignore[attr-defined]

        def finished(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        task.add_done_callback(finished)

    def _cancel(self, future: concurrent.futures.Future[Any]) -> None:
        def cancel() -> None:
            task = getattr(future, "_stepladder_task", None)
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)
        with contextlib.suppress(BaseException):  # what the cancelled work raised is not the news
            future.result(timeout=30)

    def close(self) -> None:
        """Cancel what still runs, let it clean up, and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._wind_down(), self._loop).result(timeout=30)
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        if not self._thread.is_alive():
            self._loop.close()

    async def _wind_down(self) -> None:
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()
        await asyncio.get_running_loop().shutdown_default_executor()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
