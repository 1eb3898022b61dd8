"""The compute thread: runs steps while there is work, and commands between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from stepladder.errors import EngineError, InvariantError
from stepladder.threads import release_team

log = logging.getLogger(__name__)
T = TypeVar("T")


class Worker:
    """Owns a thread. `due`, `stalled` and `add` run under `wake`; steps and commands run outside it.

    Args:
        due: is there a step to take?
        step: one step.
        ended: called on the thread as its last act, with the exception that every waiter should get.
        stalled: called each `patience` seconds without anything to do.
    """

    def __init__(
        self,
        *,
        due: Callable[[], bool],
        step: Callable[[], None],
        ended: Callable[[Callable[[], Exception]], None],
        stalled: Callable[[], None],
        patience: float = 60.0,
    ) -> None:
        self.wake = threading.Condition()
        self.failure: BaseException | None = None
        self.closing = False
        self._due, self._step, self._ended, self._stalled = due, step, ended, stalled
        self._patience = patience
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._thread = threading.Thread(target=self._run, name="stepladder-engine", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread, between two steps, and wait for its result."""
        release_team()
        return self.post(work).result()

    def post(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the thread, between two steps. A command that raises ends the worker."""
        done: Future[T] = Future()
        with self.wake:
            self.check()
            self._commands.append((work, done))
            self.wake.notify_all()
        return done

    def check(self) -> None:
        """Raise what a caller should see if the thread is gone or going."""
        if self.failure is not None or self.closing:
            raise self.epitaph()

    def epitaph(self) -> Exception:
        """Why no more tokens come; a new object each time, for it gets a traceback of its own."""
        if self.failure is None:
            return EngineError("the engine is closed; make a new one")
        error = InvariantError(
            f"the engine's compute thread failed with {type(self.failure).__name__}: {self.failure}"
        )
        error.__cause__ = self.failure
        return error

    def close(self) -> None:
        """End the thread after the step under way. Idempotent."""
        with self.wake:
            self.closing = True
            self.wake.notify_all()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with torch.no_grad():
                while self._turn():
                    pass
        except BaseException as error:  # every waiter must hear of it; nothing may hang
            failure = error
            log.error("the engine's compute thread failed", exc_info=error)
        with self.wake:
            self.failure, self.closing = failure, True
            commands, self._commands = self._commands, []
        for _, done in commands:
            done.set_exception(self.epitaph())
        self._ended(self.epitaph)

    def _turn(self) -> bool:
        with self.wake:
            while not (self.closing or self._commands or self._due()):
                release_team()
                if not self.wake.wait(self._patience):
                    self._stalled()
            if self.closing:
                return False
            commands, self._commands = self._commands, []
            due = self._due()
        while commands:
            work, done = commands.pop(0)
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
                self._commands = commands + self._commands
                raise
        if due:
            self._step()
        return True
