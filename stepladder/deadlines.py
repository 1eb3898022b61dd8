"""Calling code that is not ours, with a deadline, and without ever blocking the event loop.

Coroutine functions run on the loop and are cancelled at the deadline. Plain functions run in daemon
threads; a thread cannot be killed, so at the deadline it is abandoned (and counted): it never blocks the
interpreter's exit and its place is given to a new thread. A coroutine that computes without awaiting
holds the loop, and no deadline can stop it: write such code as a plain function.

The clock starts when the function starts, and stops while the event loop itself stands still: a backward
pass of ten seconds on the loop's thread fires no deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stepladder.errors import BoundaryError, EnvironmentFault, StepladderError

# Errors that mean "this code is wrong", whatever its input was: they end the run with their traceback.
# Everything else that foreign code raises belongs to one episode and becomes data.
PROGRAMMING_ERRORS: tuple[type[BaseException], ...] = (
    TypeError,
    NameError,
    AttributeError,
    ImportError,
    SyntaxError,
    AssertionError,
    NotImplementedError,
    MemoryError,
)

_MAX_THREADS = 128
_IDLE_SECONDS = 5.0
_GRACE_SECONDS = 1.0  # how long a cancelled coroutine may take to clean up


class DeadlinePassed(TimeoutError):
    """A call ran longer than it may. `seconds` is the deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} s")
        self.seconds = seconds


class CalledExit(RuntimeError):
    """Foreign code called sys.exit(); that ends its own call, not ours."""


class CancelledItself(RuntimeError):
    """Foreign code ended by CancelledError although nobody cancelled it: a failure of that call."""


def cancelled_from_outside() -> bool:
    """Has the running task been asked to stop? Otherwise a CancelledError in it is somebody's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def call_bounded(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    deadline: float,
    inline: bool = False,
) -> Any:
    """`function(*args, **kwargs)`, awaited if need be; raises DeadlinePassed after `deadline` seconds.

    `inline` calls it directly, with no thread, no task and no deadline: for code that is fast and never
    waits, or that bounds its own waiting.

    Raises CalledExit and CancelledItself where the function tries to end more than its own call.
    """
    try:
        return await _call(function, args, kwargs or {}, deadline, inline)
    except asyncio.CancelledError:
        if cancelled_from_outside():
            raise
        raise CancelledItself("was cancelled from within (a CancelledError that nobody asked for)") from None


async def _call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    deadline: float,
    inline: bool,
) -> Any:
    if inline:
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:
            raise CalledExit(f"called sys.exit({error.code!r})") from None
    if inspect.iscoroutinefunction(function):
        return await _bounded_awaitable(function(*args, **kwargs), deadline)
    result = await _bounded_thread(lambda: function(*args, **kwargs), deadline)
    if inspect.isawaitable(result):
        return await _bounded_awaitable(result, deadline)
    return result


async def guarded(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    where: str,
    *,
    deadline: float,
    inline: bool = False,
    error_class: type[BoundaryError] = EnvironmentFault,
) -> Any:
    """Call foreign code: its failures become `error_class` naming `where`, programming errors propagate."""
    try:
        return await call_bounded(function, args, kwargs, deadline=deadline, inline=inline)
    except DeadlinePassed:
        raise error_class(
            f"{where} gave no result within {deadline:g} s; find what hangs, or give a longer `deadline`"
        ) from None
    except StepladderError:
        raise
    except PROGRAMMING_ERRORS as error:
        error.add_note(f"raised in {where}")
        raise
    except Exception as error:  # a failure of this episode, recorded with its boundary
        raise error_class(f"{where} raised {type(error).__name__}: {error}") from error


def abandoned_threads() -> int:
    """How many functions are still running past their deadline in threads nobody waits for."""
    return _threads.abandoned


async def _bounded_awaitable(awaitable: Awaitable[Any], deadline: float) -> Any:
    task = asyncio.ensure_future(_without_exit(awaitable))
    if inspect.iscoroutine(awaitable):  # cancelled before it began, it would complain of never being awaited
        task.add_done_callback(lambda _: awaitable.close())
    try:
        done = await _wait(task, deadline, started=lambda: True)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as lost
        raise DeadlinePassed(deadline)
    return task.result()


async def _without_exit(awaitable: Awaitable[Any]) -> Any:
    """Inside the task: a task that ends by SystemExit stops the event loop it runs on."""
    try:
        return await awaitable
    except SystemExit as error:
        raise CalledExit(f"called sys.exit({error.code!r})") from None


async def _bounded_thread(function: Callable[[], Any], deadline: float) -> Any:
    job = _Job(function, asyncio.get_running_loop())
    _threads.submit(job)
    try:
        done = await _wait(job.future, deadline, started=job.started)
    except asyncio.CancelledError:
        _threads.abandon(job)
        if not job.future.cancel():  # else what it returns is dropped on delivery
            _drop(job.future.result())
        raise
    if not done:
        _threads.abandon(job)
        job.future.cancel()
        raise DeadlinePassed(deadline)
    error, value = job.future.result()
    if isinstance(error, SystemExit):
        raise CalledExit(f"called sys.exit({error.code!r})") from None
    if error is not None:
        raise error
    return value


async def _wait(future: asyncio.Future[Any], seconds: float, started: Callable[[], bool]) -> bool:
    """Whether `future` is done within `seconds` of time in which it ran and the loop was alive."""
    left = seconds
    tick = min(max(seconds / 8, 0.01), 1.0)
    while not future.done():
        if left <= 0:
            await asyncio.sleep(0)  # a result that is already on its way still counts
            return future.done()
        counting = started()
        began = time.monotonic()
        await asyncio.wait({future}, timeout=min(tick, left))
        if counting:
            left -= min(time.monotonic() - began, 1.5 * tick)  # more means that the loop stood still
    return True


class _Job:
    """One call of a plain function in a thread, and the future that its event loop waits on."""

    __slots__ = ("_started", "abandoned", "context", "finished", "function", "future", "loop")

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.loop = loop
        self.future: asyncio.Future[tuple[BaseException | None, Any]] = loop.create_future()
        self.context = contextvars.copy_context()
        self._started = False
        self.abandoned = False
        self.finished = False

    def started(self) -> bool:
        return self._started

    def run(self) -> None:
        self._started = True
        outcome: tuple[BaseException | None, Any]
        try:
            outcome = (None, self.context.run(self.function))
        except BaseException as error:  # noqa: BLE001  handed over to the event loop, which raises it
            outcome = (error, None)
        if self.abandoned:
            _drop(outcome)
            return
        try:
            self.loop.call_soon_threadsafe(self._deliver, outcome)
        except RuntimeError:  # the loop closed while an abandoned call went on
            _drop(outcome)

    def _deliver(self, outcome: tuple[BaseException | None, Any]) -> None:
        if self.future.done():
            _drop(outcome)
        else:
            self.future.set_result(outcome)


def _drop(outcome: tuple[BaseException | None, Any]) -> None:
    """Nobody waits for it any more: a coroutine among it would complain of never being awaited."""
    if inspect.iscoroutine(outcome[1]):
        outcome[1].close()


class _Threads:
    """Reused daemon threads. An abandoned one gives up its place at once and ends when its call does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Empty; also what a forked child starts from, since threads do not survive a fork."""
        self._condition = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._idle = 0
        self._live = 0
        self.abandoned = 0

    def submit(self, job: _Job) -> None:
        with self._condition:
            self._queue.append(job)
            if self._idle >= len(self._queue):
                self._condition.notify()
            else:
                self._grow()

    def abandon(self, job: _Job) -> None:
        with self._condition:
            if job in self._queue:
                self._queue.remove(job)
            elif not job.finished:
                job.abandoned = True
                self._live -= 1
                self.abandoned += 1
                if self._queue:
                    self._grow()

    def _grow(self) -> None:
        if self._live < self.limit:
            self._live += 1
            threading.Thread(target=self._work, name="stepladder-call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._condition:
                job.finished = True
                if job.abandoned:
                    self.abandoned -= 1
                    return

    def _next(self) -> _Job | None:
        with self._condition:
            while not self._queue:
                self._idle += 1
                notified = self._condition.wait(_IDLE_SECONDS)
                self._idle -= 1
                if not notified and not self._queue:
                    self._live -= 1
                    return None
            return self._queue.popleft()


class DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """For `loop.set_default_executor`: what an environment sends to `asyncio.to_thread` and then hangs.

    A pool's threads are joined when the interpreter exits, so that one of them that hangs keeps a finished
    run from ending; and a few such calls fill the pool, so that the deadlines of all others pass in its
    queue. Here each call has a daemon thread of its own.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def work() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001  belongs to whoever awaits it
                    done.set_exception(error)

        threading.Thread(target=work, name="stepladder-to-thread", daemon=True).start()
        return done


_threads = _Threads(_MAX_THREADS)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.reset)
