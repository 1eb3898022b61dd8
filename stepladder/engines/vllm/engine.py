"""vLLM behind the engine protocol: token ids in and out over HTTP, weights through a folder.

The server is a child process in an environment of its own, or one that runs already. Requests are streamed,
so that a weight sync can cut a generation at a known token: what has arrived was sampled by the old weights,
the rest is asked for anew, and each token carries its version.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from stepladder.deadlines import cancelled_from_outside
from stepladder.engines.stats import Stats
from stepladder.engines.vllm.control import Control
from stepladder.engines.vllm.flight import Flights
from stepladder.engines.vllm.handshake import Handshake, Scores
from stepladder.engines.vllm.wire import Draw, completion, prompt_logprobs, scoring
from stepladder.errors import ConfigError, EngineError, InvariantError
from stepladder.types import Generation, Sampling, Versions

_CONTINUED = 0x9E3779B97F4A7C15  # spreads the seeds of the parts of a generation that a sync cut


class VllmEngine:
    """Generates with a vLLM server. Close it: it may own a process and a folder of weights.

    The stream of a request depends on its seed, and on what shares its batch as far as float noise reaches;
    there is no exact mode.

    Args:
        control: the line to the server, see `stepladder.engines.vllm.control.start` and `connect`.
        export: writes the policy's present weights to a folder as Hugging Face safetensors, adapters merged
            into a copy.
        vocabulary: ids below it may be sent and are accepted.
        max_context: longest prompt + generation in tokens.
        scores: `scores(ids, temperature)` are the policy's own log p of ids[1:], what the server's are held
            against: at the start, and after each sync.
        dtype: what the server computes in; decides how near the two must be.
        deadline: seconds without a word from the server before a request is given up.
        folder: where weights are written for the server; by default its own folder, or a temporary one.

    Raises:
        EngineError: the server does not sample from the policy, or does not say so truly (`Handshake`).
    """

    in_process = False
    exact = False

    def __init__(
        self,
        control: Control,
        *,
        export: Callable[[Path], object],
        scores: Scores,
        vocabulary: int,
        max_context: int,
        dtype: torch.dtype,
        deadline: float = 120.0,
        folder: Path | None = None,
    ) -> None:
        self.dtype, self.max_context, self.vocabulary = dtype, max_context, vocabulary
        self.control, self.version, self.deadline = control, 0, deadline
        self._export, self._scores = export, scores
        shake = Handshake(control, vocabulary, max_context, dtype)
        self.mismatch = shake.run(scores)
        self._probe = shake.ids
        # Kernels differ by about as much as at the start; weights that did not arrive differ by far more.
        self._nearest = max(4 * self.mismatch, 1e-3 if dtype == torch.float32 else 0.05)
        if folder is None and control.server is not None:
            folder = control.server.folder  # goes with the server, also when this process is killed
        self._home = Path(tempfile.mkdtemp(prefix="stepladder-weights-", dir=folder))
        self._folders: list[Path] = []
        self._flights = Flights(deadline)
        self._lock = threading.Lock()
        self._stats = Stats()
        self._closed = False

    def session(self, key: str = "") -> VllmSession:
        """Open a session; the server keeps nothing for it but its prefix cache."""
        self._check_open()
        return VllmSession(self, key)

    def sync(self, version: int) -> None:
        """Load the policy's present weights into the server as `version`; blocks until they serve.

        Generations under way are cut and go on with the new weights after a new prefill. The server's prefix
        cache is emptied. Call it from a thread that runs no generation of its own.

        Raises:
            EngineError: the server did not take the weights; which ones it then holds is unknown.
            InvariantError: it says that it took them, and its log-probabilities are not the policy's.
        """
        self._check_open()
        folder = self._home / f"weights-{version}-{len(self._folders)}"
        self._export(folder)
        with self._flights.grounded():
            self.control.reload(folder)
            self._prove(version)
            self.version = version
        for old in self._folders:
            shutil.rmtree(old, ignore_errors=True)
        self._folders = [folder]

    def canary(self) -> float:
        """Mean |server's log-probability - policy's| on fixed tokens, nats a token."""
        said, wanted = self.token_logprobs(self._probe), self._scores(self._probe, 1.0)
        return sum(abs(a - b) for a, b in zip(said, wanted, strict=True)) / len(said)

    def _prove(self, version: int) -> None:
        off = self.canary()
        if not off <= self._nearest:  # NaN is not
            raise InvariantError(
                f"the weight sync to version {version} did not arrive: on {len(self._probe)} fixed tokens "
                f"the server's log-probabilities are {off:.3g} nats a token from the policy's (at the start "
                f"{self.mismatch:.3g}, allowed {self._nearest:.3g}). The server may be unable to load new "
                "weights into this model (shared or packed tensors)"
            )

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p of `token_ids[1:]`, each given what precedes it, at temperature 1, cache unused."""
        self._check_open()
        return prompt_logprobs(self.control.score(scoring(self.control.model, token_ids)), token_ids)

    def weights_fingerprint(self) -> str:
        """Changes exactly with the weights that the server holds, as far as it tells; see `Control`."""
        self._check_open()
        return self.control.fingerprint()

    def drop_prefixes(self) -> None:
        """Empty the server's prefix cache."""
        self.control.drop_prefixes()

    def rest(self) -> None:
        """A server keeps its memory."""

    def stats(self) -> Stats:
        """Counters since the last call; `seconds` is the time with at least one request under way."""
        with self._lock:
            stats, self._stats = self._stats, Stats()
        stats.seconds = self._flights.take_seconds()
        return stats

    async def close(self) -> None:
        """End the server that this engine started; whoever still waits gets an `EngineError`."""
        if self._closed:
            return
        self._closed = True
        await self._flights.close()
        await self.control.close()
        shutil.rmtree(self._home, ignore_errors=True)

    # Called by sessions on the event loop

    def check(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Refuse what cannot be served, before it is sent."""
        self._check_open()
        if not ids:
            raise EngineError("the prompt is empty; give at least one token id, such as the BOS token")
        if len(ids) >= self.max_context:
            raise EngineError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_context}, prompt and "
                f"generation together; shorten the prompt or raise max_context"
            )
        bad = [token for token in ids if not 0 <= token < self.vocabulary]
        if bad:
            raise EngineError(
                f"token id {bad[0]} is outside the model's vocabulary 0 .. {self.vocabulary - 1}"
            )
        if sampling.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1; got {sampling.max_tokens}; try 256")
        if not 0.0 <= sampling.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or more; got {sampling.temperature}; try 1.0")

    async def draw(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """One generation, in as many requests as weight syncs cut it into."""
        room = min(sampling.max_tokens, self.max_context - len(ids))
        got: list[int] = []
        logprobs: list[float] = []
        versions: list[tuple[int, int]] = []
        while True:
            rest = Sampling(
                sampling.temperature,
                room - len(got),
                sampling.stop_token_ids,
                (sampling.seed + _CONTINUED * len(got)) & (2**63 - 1),
            )
            draw = Draw([*ids, *got], rest, self.vocabulary)
            body = completion(self.control.model, draw.prompt_ids, rest)
            version = await self._flights.fly(self.control, body, draw, lambda: self.version)
            got += draw.ids
            logprobs += draw.logprobs
            if draw.ids:
                versions.append((version, len(draw.ids)))
            self._count(draw)
            if draw.finish_reason is not None:
                return Generation(tuple(got), tuple(logprobs), _runs(versions), draw.finish_reason)

    def _count(self, draw: Draw) -> None:
        with self._lock:
            self._stats.generated += len(draw.ids)
            self._stats.prefill_computed += draw.prefilled
            self._stats.prefill_saved += draw.cached

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")


class VllmSession:
    """One episode's line to a `VllmEngine`; see `stepladder.engines.engine.Session`."""

    def __init__(self, engine: VllmEngine, key: str) -> None:
        self.key = key
        self._engine = engine
        self._closed = False
        self._task: asyncio.Task[Generation] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `prompt_ids`; see `stepladder.engines.engine.Session.generate`.

        Raises:
            EngineError: the request cannot be served; the server died, hangs, or answers what cannot be
                trained on; the session or the engine is closed.
            ConfigError: sampling parameters that mean nothing.
        """
        if self._closed:
            raise EngineError(f"session {self.key!r} is closed; open a new one with engine.session()")
        if self._task is not None:
            raise ConfigError(f"session {self.key!r} is generating; one generate at a time per session")
        ids = tuple(prompt_ids)
        self._engine.check(ids, sampling)
        self._task = asyncio.ensure_future(self._engine.draw(ids, sampling))
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._closed and not cancelled_from_outside():
                raise EngineError(f"session {self.key!r} was closed while generating") from None
            raise
        finally:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """Abandon what is under way. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> VllmSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _runs(parts: Sequence[tuple[int, int]]) -> Versions:
    """Run-length: neighbouring parts of one version become one."""
    runs: list[tuple[int, int]] = []
    for version, count in parts:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
    return tuple(runs)
