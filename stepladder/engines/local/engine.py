"""The in-process engine: generates with the policy's own weights, beside the trainer, on one machine.

A compute thread runs the scheduler; the event loop only awaits futures. Weights are taken at `sync`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from stepladder.data.positions import max_positions
from stepladder.engines.local.facts import MAX_ROWS
from stepladder.engines.local.prefix_cache import PrefixCache
from stepladder.engines.local.request import Holder, Request, uniforms
from stepladder.engines.local.scheduler import BatchLimits, Scheduler
from stepladder.engines.local.select import choose_path
from stepladder.engines.local.worker import Worker
from stepladder.engines.stats import Stats
from stepladder.engines.weights import PolicyView, resolve_dtype
from stepladder.errors import ConfigError, EngineError
from stepladder.threads import release_team
from stepladder.types import Generation, Sampling

log = logging.getLogger(__name__)


class LocalEngine:
    """Continuous batching on the policy's own weights. Close it: it owns a thread.

    The fused path, and any path in another type or on another device, computes with a copy taken at
    `sync`: the policy may be trained meanwhile. Otherwise the model's own modules run, switched to
    evaluation for each pass: do not train while a generation is under way.

    Args:
        model: a transformers causal LM, or a PEFT model around one. Its tensors are never changed; call
            `sync` after changing them.
        device, dtype: where and in what type the engine computes; None is the model's own. "auto" takes
            bf16 where the machine is measured to gain by it. Another device or type means a copy.
        max_rows: requests under way at once; more wait.
        max_context: longest prompt + generation in tokens; by default what the model was made for.
        exact: advance only when every open session waits in `generate` (or is closed), and admit in the
            order of session keys: float results then do not depend on timing. Open all sessions of a
            batch before starting them, and close each one; prefixes are kept within a batch only.
        fused: take the fused path (Llama, Qwen2, Qwen3); "auto" takes it where a probe of random tokens
            gives the model's own log-probabilities, and says so where it does not.
        pad_token_id: any valid id; padding is masked and never read.
        cache_bytes: memory for shared prefixes and for sessions between turns.
        prefill_tokens: tokens of new prompts in one pass, by default 1,024 (8,192 on cuda).
        recompute_live: at a sync, prefill generations under way again instead of keeping their caches.
        private: compute with a copy on every path, so that the policy may be trained meanwhile.

    Raises:
        ConfigError: contradictory settings, or a model that no path decodes correctly.
    """

    in_process = True

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        max_rows: int = MAX_ROWS,
        max_context: int | None = None,
        exact: bool = False,
        fused: bool | Literal["auto"] = "auto",
        pad_token_id: int | None = None,
        cache_bytes: int = 1 << 30,
        prefill_tokens: int | None = None,
        recompute_live: bool = False,
        private: bool = False,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows must be at least 1; got {max_rows}; try {MAX_ROWS}")
        where = torch.device(device) if device is not None else next(model.parameters()).device
        view = PolicyView(model, where, resolve_dtype(dtype, where), private=private)
        self.dtype, self.device, self.exact = view.dtype, where, exact
        self.max_context = _context(view.policy, max_context)
        self._vocabulary = view.policy.get_input_embeddings().weight.shape[0]
        self._path = choose_path(view, self.max_context, fused, pad_token_id or 0)
        self._recompute_live = recompute_live
        tokens = prefill_tokens or (8192 if where.type == "cuda" else 1024)
        limits = BatchLimits(max_rows, self.max_context, tokens)
        prefixes = PrefixCache(cache_bytes)
        self._scheduler = Scheduler(self._path.forward, self._path.store, prefixes, limits, ordered=exact)
        self._waiting: dict[LocalSession, Request | None] = {}  # every open session -> what it waits for
        self._opened = 0
        self._outbox: list[Request] = []
        self._arrived: list[Request] = []
        self._pending: set[Request] = set()
        self._worker = Worker(due=self._due, step=self._step, ended=self._ended, stalled=self._stalled)

    @property
    def version(self) -> int:
        """The weight version that the next token is sampled with."""
        return self._scheduler.version

    @property
    def path(self) -> str:
        """Which forward pass is in use: "fused", "default" or "plain"."""
        return self._path.name

    def session(self, key: str = "") -> LocalSession:
        """Open a session. In exact mode the engine waits for it until it is closed."""
        with self._worker.wake:
            self._worker.check()
            if self.exact and not self._waiting:  # a batch is a function of weights and tasks alone
                self._worker.post(self._scheduler.prefixes.clear)
            session = LocalSession(self, Holder(key, self._opened))
            self._opened += 1
            self._waiting[session] = None
        return session

    def sync(self, version: int) -> None:
        """Take over the model's present weights as `version`. Blocks until the step under way is over.

        Prefixes are dropped. Generations under way go on with the new weights and keep their caches (or
        are prefilled again, see `recompute_live`); their tokens carry the version that sampled each.
        """

        def take() -> None:
            self._path.refresh()
            self._scheduler.outdate(recompute=self._recompute_live)
            self._scheduler.version = version

        self._worker.do(take)

    def weights_fingerprint(self) -> str:
        """A hash of the weights as the engine holds them."""
        return self._worker.do(self._path.fingerprint)

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p of `token_ids[1:]`, each given what precedes it, at temperature 1, cache unused.

        What a sync is proven with: the trainer computes the same numbers from its own weights.
        """
        ids = list(token_ids)
        return self._worker.do(lambda: self._scheduler.score(ids))

    def drop_prefixes(self) -> None:
        """Forget shared prefixes and the caches of sessions between turns."""
        self._worker.do(self._scheduler.prefixes.clear)

    def rest(self) -> None:
        """Give back the memory of rows (not on CUDA) and prefixes, unless something is under way."""

        def give_back() -> None:
            self._scheduler.drop_cancelled()
            if not (self._scheduler.busy or any(not request.cancelled for request in self._arrived)):
                self._scheduler.prefixes.clear()
                self._path.forward.rest()

        self._worker.do(give_back)

    def stats(self) -> Stats:
        """Counters since the last call."""

        def swap() -> Stats:
            stats, self._scheduler.stats = self._scheduler.stats, Stats()
            return stats

        return self._worker.do(swap)

    async def close(self) -> None:
        """End the compute thread; whoever still waits gets an `EngineError`."""
        self._worker.close()
        await asyncio.to_thread(self._worker.join)

    # Called by sessions on the event loop

    def check(self, ids: tuple[int, ...], sampling: Sampling) -> None:
        """Refuse what cannot be served, before it meets other requests."""
        if not ids:
            raise EngineError("the prompt is empty; give at least one token id, such as the BOS token")
        if len(ids) >= self.max_context:
            raise EngineError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_context}, prompt and "
                f"generation together; shorten the prompt or raise max_context"
            )
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            bad = next(token for token in ids if not 0 <= token < self._vocabulary)
            raise EngineError(f"token id {bad} is outside the model's vocabulary 0 .. {self._vocabulary - 1}")
        if sampling.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1; got {sampling.max_tokens}; try 256")
        if not 0.0 <= sampling.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or more; got {sampling.temperature}; try 1.0")

    def submit(self, request: Request) -> None:
        """Hand over at the end of this tick of the event loop: siblings started together arrive together."""
        self._worker.check()
        self._outbox.append(request)
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        release_team()  # of the thread with the event loop, which is going to wait
        with self._worker.wake:
            requests, self._outbox = self._outbox, []
            for request in requests:
                if request.cancelled:
                    continue
                if self._worker.closing:
                    request.done(self._worker.epitaph())
                    continue
                self._arrived.append(request)
                self._pending.add(request)
                if request.session in self._waiting:
                    self._waiting[request.session] = request
            self._worker.wake.notify_all()

    def finished(self, request: Request) -> None:
        """The request has its result, or nobody waits for it any more."""
        with self._worker.wake:
            self._pending.discard(request)
            if self._waiting.get(request.session) is request:
                self._waiting[request.session] = None
            self._worker.wake.notify_all()

    def abandon(self, request: Request) -> None:
        """Nobody waits for the result any more: its row is freed before the next step."""
        request.cancelled = True
        self.finished(request)

    def leave(self, session: LocalSession) -> None:
        """A session is closed."""
        with self._worker.wake:
            self._waiting.pop(session, None)
            if not self._worker.closing:
                self._worker.post(lambda: self._scheduler.release(session.holder))

    # Called by the compute thread

    def _due(self) -> bool:
        busy = bool(self._arrived) or self._scheduler.busy
        return busy and not (self.exact and self._absent())

    def _step(self) -> None:
        with self._worker.wake:
            arrived, self._arrived = self._arrived, []
        self._scheduler.waiting += arrived
        self._scheduler.step()

    def _ended(self, epitaph: Callable[[], Exception]) -> None:
        with self._worker.wake:
            pending = list(self._pending)
        for request in pending:
            request.done(epitaph())
        self._path.forward.free()

    def _stalled(self) -> None:
        if self._arrived or self._scheduler.busy:
            log.warning("exact mode waits for sessions that are open but idle: %s", self._absent()[:8])

    def _absent(self) -> list[str]:
        """Keys of the open sessions that do not wait for tokens."""
        return [session.holder.key for session, request in self._waiting.items() if request is None]


class LocalSession:
    """One episode's line to a `LocalEngine`; see `stepladder.engines.engine.Session`."""

    def __init__(self, engine: LocalEngine, holder: Holder) -> None:
        self.holder = holder
        self._engine = engine
        self._closed = False
        self._under_way: tuple[Request, asyncio.Future[Generation]] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `prompt_ids`; see `stepladder.engines.engine.Session.generate`.

        Raises:
            EngineError: the prompt is empty, has ids outside the vocabulary or does not fit the context;
                the session or the engine is closed.
            ConfigError: sampling parameters that mean nothing.
            InvariantError: the compute thread failed; its error is the cause.
        """
        if self._closed:
            raise EngineError(f"session {self.holder.key!r} is closed; open a new one with engine.session()")
        if self._under_way is not None:
            raise ConfigError(
                f"session {self.holder.key!r} is generating; one generate at a time per session"
            )
        ids = tuple(prompt_ids)
        self._engine.check(ids, sampling)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        count = min(sampling.max_tokens, self._engine.max_context)
        request = Request(self, self.holder, ids, sampling, uniforms(sampling.seed, count))

        def done(result: Generation | Exception) -> None:
            self._engine.finished(request)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result)

        request.done = done
        self._under_way = request, future
        try:
            self._engine.submit(request)
            return await future
        finally:
            self._under_way = None
            if not future.done() or future.cancelled():
                self._engine.abandon(request)

    def close(self) -> None:
        """Release what the engine keeps for this session. Call it on the event loop. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._under_way is not None:
                request, future = self._under_way
                self._engine.abandon(request)
                _settle(future, EngineError(f"session {self.holder.key!r} was closed while generating"))
            self._engine.leave(self)

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settle(future: asyncio.Future[Generation], result: Generation | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _context(model: Any, asked: int | None) -> int:
    """The longest sequence: what was asked for, at most what the model has positions for."""
    made_for = max_positions(model)
    if asked is None:
        return made_for or 4096
    if asked < 2:
        raise ConfigError(f"max_context must be at least 2 (a prompt and a token); got {asked}; try 2048")
    if made_for is not None and asked > made_for:
        raise ConfigError(
            f"max_context is {asked}, but the model has positions for {made_for}; use {made_for} or less"
        )
    return asked
