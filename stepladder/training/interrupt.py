"""Ctrl-C between the parts of a step, never in the middle of an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Abandoned(KeyboardInterrupt):
    """A second Ctrl-C broke into a block that may not be broken into: nothing of it can be saved."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a first Ctrl-C back until the block is done; a second one goes through at once, as `Abandoned`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise Abandoned
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt
