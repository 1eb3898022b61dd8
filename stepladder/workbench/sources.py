"""What a run learns from, read once: the checks before the model is loaded and the rungs share it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Sources:
    """The files that were read and the rows that the world made, by who made them from what.

    A training file is parsed before the model is loaded, so that a wrong row costs no time; the rung that
    learns from it finds the rows here.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, ...], Any] = {}

    def once(self, read: Callable[..., T], *args: Hashable) -> T:
        """Return `read(*args)`, called at most once with these arguments."""
        key = (read, *args)
        if key not in self._kept:
            self._kept[key] = read(*args)
        value: T = self._kept[key]
        return value
