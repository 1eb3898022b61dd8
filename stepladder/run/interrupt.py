"""Ctrl-C (or SIGTERM) between the parts of a step, never in the middle of an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Abandoned(KeyboardInterrupt):
    """A second Ctrl-C broke into a block that may not be broken into: nothing of it can be saved."""


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which schedulers send before they take a machine away, stops a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a first Ctrl-C back until the block is done; a second one goes through at once, as `Abandoned`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise Abandoned
        held = True

    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, hold)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
    if held:
        raise KeyboardInterrupt
