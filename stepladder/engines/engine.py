"""The engine protocol: token ids in, token ids with log-probabilities and weight versions out.

An engine knows no text, no tools and no rewards. One episode opens one `Session`, asks it for one
generation per turn, and closes it; what the engine keeps between turns (a KV cache, a connection) hangs
on the session. The in-process engine, a vLLM server behind HTTP and the scripted engine of the tests all
fit behind these two classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch

from stepladder.engines.stats import Stats
from stepladder.types import Generation, Sampling


@runtime_checkable
class Session(Protocol):
    """One episode's line to the engine. At most one `generate` at a time; `close` is idempotent."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `prompt_ids`, the whole conversation so far, by up to `sampling.max_tokens` tokens.

        The stop token that ended the turn is kept, with its log-probability. The token stream is drawn
        from `sampling.seed` alone, whatever else the engine is doing; give every turn and sibling its own.

        Raises:
            EngineError: this request cannot be served (too long, bad ids); recorded with the episode.
        """
        ...

    def close(self) -> None:
        """Release what the engine keeps for this session. A waiting `generate` is abandoned."""
        ...

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """Opens sessions. `version` is the weight version that the next token is sampled with."""

    @property
    def version(self) -> int: ...

    def session(self, key: str = "") -> Session:
        """Open a session. `key` orders admission where an engine promises an order (exact mode)."""
        ...

    async def close(self) -> None:
        """End every session and free the engine's threads and memory."""
        ...


@runtime_checkable
class PolicyEngine(Engine, Protocol):
    """An engine on the weights of a policy in training: what the training loops ask for."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def in_process(self) -> bool:
        """True: computes with the trainer's own modules, so that in fp32 both give the same numbers."""
        ...

    @property
    def max_context(self) -> int:
        """Longest prompt and generation together, in tokens."""
        ...

    def sync(self, version: int) -> None:
        """Take over the policy's present weights as `version`."""
        ...

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p of `token_ids[1:]` by the engine's weights, at temperature 1."""
        ...

    def weights_fingerprint(self) -> str:
        """Changes with the weights that the engine holds."""
        ...

    def rest(self) -> None:
        """Nothing is asked for a while: give back what memory can be had again. An update wants it."""
        ...

    def stats(self) -> Stats:
        """Counters since the last call."""
        ...
