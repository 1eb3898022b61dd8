"""An engine that plays given tokens: for tests of everything above the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from stepladder.errors import EngineError
from stepladder.types import Generation, Sampling

Script: TypeAlias = Sequence[Sequence[int]]  # one entry of token ids per turn


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """What a session was asked, kept in `ScriptedEngine.requests` for tests to look at."""

    key: str
    turn: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling


class ScriptedEngine:
    """Plays `script[key][turn]` (or `script(request)`), cut at a stop token and at `max_tokens`.

    Every token gets `logprob`, or what `logprobs(request, token_ids)` returns. A turn that the script
    does not have raises `EngineError`; so does a script entry that is an exception: it is raised as it is.

    >>> engine = ScriptedEngine({"a": [[5, 2]]})
    >>> session = engine.session("a")
    >>> asyncio.run(session.generate([1], Sampling(stop_token_ids=(2,)))).finish_reason
    'stop'
    """

    def __init__(
        self,
        script: Mapping[str, Sequence[Sequence[int] | Exception]]
        | Callable[[ScriptedRequest], Sequence[int]],
        *,
        logprob: float = -1.0,
        logprobs: Callable[[ScriptedRequest, Sequence[int]], Sequence[float]] | None = None,
        delay: float = 0.0,
    ) -> None:
        self.version = 0
        self.requests: list[ScriptedRequest] = []
        self.open_sessions = 0
        self._script = script
        self._logprob = logprob
        self._logprobs = logprobs
        self._delay = delay

    def session(self, key: str = "") -> ScriptedSession:
        self.open_sessions += 1
        return ScriptedSession(self, key)

    async def close(self) -> None:
        """Nothing to free."""

    async def play(self, request: ScriptedRequest) -> Generation:
        """The generation that the script has for `request`."""
        self.requests.append(request)
        await asyncio.sleep(self._delay)
        tokens = list(self._tokens(request))[: request.sampling.max_tokens]
        stops = request.sampling.stop_token_ids
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        tokens = tokens[:end]
        given = self._logprobs(request, tokens) if self._logprobs else [self._logprob] * len(tokens)
        versions = ((self.version, len(tokens)),) if tokens else ()
        return Generation(tuple(tokens), tuple(given), versions, "length" if end is None else "stop")

    def _tokens(self, request: ScriptedRequest) -> Sequence[int]:
        if callable(self._script):
            return self._script(request)
        turns = self._script.get(request.key, ())
        if request.turn >= len(turns):
            raise EngineError(
                f"the script has {len(turns)} turns for session {request.key!r}; turn {request.turn} was "
                f"asked. Sessions in the script: {sorted(self._script)}"
            )
        entry = turns[request.turn]
        if isinstance(entry, Exception):
            raise entry
        return entry


@dataclass(slots=True)
class ScriptedSession:
    """One scripted episode; see `ScriptedEngine`."""

    engine: ScriptedEngine
    key: str
    turn: int = 0
    closed: bool = field(default=False)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        if self.closed:
            raise EngineError(f"session {self.key!r} is closed; open a new one with engine.session()")
        request = ScriptedRequest(self.key, self.turn, tuple(prompt_ids), sampling)
        self.turn += 1
        return await self.engine.play(request)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.open_sessions -= 1

    def __enter__(self) -> ScriptedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
