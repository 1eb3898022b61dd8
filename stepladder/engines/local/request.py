"""What the scheduler works on: requests, the rows they share, and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepladder.engines.local.prefix_cache import Node
from stepladder.types import FinishReason, Generation, Sampling

MIXED = -1  # a row whose cache was computed by more than one version of the weights


@dataclass(eq=False, slots=True)
class Holder:
    """What the scheduler keeps of a session: its place in the order and where its history ends."""

    key: str
    order: int
    node: Node | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One generation under way. `done` is called with the result or with an exception.

    `session` is whose turn it is, opaque here; `uniforms` has one number for each token that may come.
    """

    session: Any
    holder: Holder
    prompt: tuple[int, ...]
    sampling: Sampling
    uniforms: list[float]
    done: Callable[[Generation | Exception], None] = lambda result: None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    cancelled: bool = False

    @property
    def rank(self) -> tuple[str, int]:
        return self.holder.key, self.holder.order

    @property
    def uniform(self) -> float:
        """The random number of the next token."""
        return self.uniforms[len(self.ids)]

    def accept(self, token: int, logprob: float, version: int) -> None:
        """Take a sampled token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1][1] += 1
        else:
            self.versions.append([version, 1])

    def finished(self, max_context: int) -> FinishReason | None:
        """Why the generation is over, or None."""
        if self.ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        total = len(self.prompt) + len(self.ids)
        return "length" if len(self.ids) >= self.sampling.max_tokens or total >= max_context else None

    def result(self, reason: FinishReason) -> Generation:
        """The finished generation."""
        versions = tuple((version, count) for version, count in self.versions)
        return Generation(tuple(self.ids), tuple(self.logprobs), versions, reason)


def uniforms(seed: int, count: int) -> list[float]:
    """`count` numbers in [0, 1), from `seed` alone: the random stream of one request.

    Philox is counter-based: neighbouring seeds give unrelated streams.
    """
    drawn: list[float] = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count).tolist()
    return drawn


@dataclass(eq=False, slots=True)
class DecodedRow:
    """A slot of the cache: `ids` are the tokens whose keys and values it holds, `pending` come next: what is
    left of the prompt, then one token at a time.

    All members have had the same tokens so far.
    """

    ids: list[int]
    members: list[Request]
    version: int
    pending: list[int]
    drawn: bool = False  # its prompt is computed, and at least one token was drawn
