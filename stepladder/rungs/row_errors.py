"""Which of a thousand rows? An error of one is named by what its conversation begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stepladder.errors import DataError
from stepladder.types import Message


@contextmanager
def naming(messages: Sequence[Message]) -> Iterator[None]:
    """Around the encoding of a row: `DataError` and `TemplateError` are raised anew with its beginning."""
    try:
        yield
    except DataError as problem:
        begins = messages[0].text[:60]
        raise type(problem)(f"the conversation that begins {begins!r}: {problem}") from problem
