"""Ways to break into a run at a chosen place, for the tests of what a resumed run does."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable
from typing import Any

import pytest


class Crash(Exception):
    """What no code of ours catches."""


def at_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, act: Callable[[], None], *, after: bool
) -> None:
    """Do `act` before (or after) the given call of `owner.name`; the others pass through."""
    honest, count = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            act()
        result = honest(*args, **kwargs)
        if count == call and after:
            act()
        return result

    async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            act()
            await asyncio.sleep(0)  # here a Ctrl-C is felt
        result = await honest(*args, **kwargs)
        if count == call and after:
            act()
            await asyncio.sleep(0)
        return result

    monkeypatch.setattr(owner, name, wrapped_async if inspect.iscoroutinefunction(honest) else wrapped)


def crash() -> None:
    raise Crash


def interrupt() -> None:
    """As a Ctrl-C would."""
    signal.raise_signal(signal.SIGINT)
