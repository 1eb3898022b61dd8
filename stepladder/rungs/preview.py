"""What `stepladder inspect` shows of a rung: its first samples, as they will be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample: its name, what is said of it, and its tokens in colours (see `rungs.coloured`)."""

    title: str
    detail: str
    text: Text


@dataclass(frozen=True, slots=True)
class Preview:
    """The first samples of a rung, below a headline and what there is to say of the data."""

    headline: str
    notes: Sequence[str]
    shown: Sequence[Shown]
