"""The line to a vLLM server: streams, scores, weight reloads; and how a server is started or found."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stepladder.engines.vllm.server import MODEL, VllmServer
from stepladder.engines.vllm.wire import Draw
from stepladder.engines.weights import WeightHash
from stepladder.errors import ConfigError, EngineError

_RELOAD = ("collective_rpc", "reset_prefix_cache")
_RELOAD_SECONDS = 600.0  # at least; large models come from a disk


class Control:
    """HTTP to one server, over its private socket or a URL. Every failure is an `EngineError` with its cause.

    Plain calls block the thread that makes them; `stream` belongs to the event loop it is first used on.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        url: str = "http://vllm",
        server: VllmServer | None = None,
        deadline: float = 120.0,
    ) -> None:
        httpx = require_httpx()
        self.server, self.url, self.deadline = server, url.rstrip("/"), deadline
        self.model, self.dtype = MODEL, dtype
        self.loaded = ""  # a hash of the weights that the server was given last
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
        self._common: dict[str, Any] = {
            "base_url": self.url,
            "headers": {} if server else headers,
            "trust_env": False,
        }
        # No connection is used twice: one that the server closes just as it is used again loses a request.
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._uds = str(server.socket) if server else None
        transport = httpx.HTTPTransport(uds=self._uds, limits=self._limits)
        self._client = httpx.Client(transport=transport, timeout=deadline, **self._common)
        self._streams: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def answers(self) -> bool:
        """Is anybody there?"""
        import httpx

        if self.server is not None and not self.server.listens():
            return False
        try:
            return bool(self._client.get("/health", timeout=5.0).status_code == 200)
        except httpx.HTTPError:
            return False

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """The lines of a streamed completion. How long it may be silent is watched by the caller."""
        import httpx

        self._require_alive()
        try:
            async with self._async_client().stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused("/v1/completions", response)
                async for line in response.aiter_lines():
                    yield self._whole(line)
        except httpx.HTTPError as error:
            if self.server is not None and isinstance(error, httpx.TransportError):
                await asyncio.sleep(0.5)  # a dying server closes its sockets before it is gone
            raise self._lost(error) from error

    def score(self, body: Mapping[str, Any]) -> Any:
        """The answer to a plain completion request."""
        return self._call("POST", "/v1/completions", body)

    def sample(self, body: Mapping[str, Any], draw: Draw) -> None:
        """A streamed completion, read to its end in this thread."""
        import httpx

        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refused("/v1/completions", response)
                for line in response.iter_lines():
                    draw.feed(self._whole(line))
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def reload(self, folder: Path) -> None:
        """Load weights from `folder`, then forget every prefix that older weights computed."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", body, timeout=max(self.deadline, _RELOAD_SECONDS))
        self.loaded = hash_of_weights(folder, self.dtype)
        self.drop_prefixes()

    def reload_from(self, export: Callable[[Path], object], home: Path | None) -> None:
        """`reload` what `export` writes, through a temporary folder in `home`: a server found running."""
        with tempfile.TemporaryDirectory(prefix="stepladder-weights-", dir=home) as folder:
            export(Path(folder) / "weights")
            self.reload(Path(folder) / "weights")

    def drop_prefixes(self) -> None:
        """Empty the prefix cache; a request that is just ending holds it for a moment."""
        until = time.monotonic() + self.deadline
        while not (self._call("POST", "/reset_prefix_cache") or {}).get("success"):
            if time.monotonic() > until:
                raise EngineError(
                    f"the vLLM server did not empty its prefix cache within {self.deadline:g} s: it still "
                    "serves requests of somebody else. Train with a server of its own"
                )
            time.sleep(0.05)

    def fingerprint(self) -> str:
        """Of the weights: the server's own checksums, and what it was given where they do not cover all.

        On the CPU vLLM keeps most weights in packed form, which its checksums see as empty.
        """
        import httpx

        try:
            response = self._client.post("/weight_checker", json={"action": "checksum"})
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        checksums = response.text if response.status_code == 200 else ""
        whole = bool(checksums) and hashlib.sha256(b"").hexdigest() not in checksums
        return hashlib.blake2b((checksums if whole else self.loaded).encode(), digest_size=16).hexdigest()

    def served(self) -> tuple[str, int]:
        """The name of the model and the longest context. Raises EngineError where there is no vLLM."""
        answer = self._call("GET", "/v1/models")
        try:
            first = answer["data"][0]
            return str(first["id"]), int(first["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/v1/models does not answer as a vLLM server: {str(answer)[:300]}"
            ) from error

    async def close(self) -> None:
        """Close the connections, and end the server if it is ours. Idempotent."""
        if self._loop is asyncio.get_running_loop():
            await self._streams.aclose()
        await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        """`close`, where no event loop has used the line yet."""
        self._client.close()
        if self.server is not None:
            self.server.close()

    def _async_client(self) -> Any:
        import httpx

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            transport = httpx.AsyncHTTPTransport(uds=self._uds, limits=self._limits)
            self._streams = httpx.AsyncClient(transport=transport, timeout=None, **self._common)  # noqa: S113
            self._loop = loop
        return self._streams

    def _call(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        import httpx

        self._require_alive()
        try:
            response = self._client.request(method, path, json=body, timeout=timeout or self.deadline)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code != 200:
            raise self._refused(path, response)
        return response.json() if response.content else None

    def _whole(self, line: str) -> str:
        """A line of a stream, unless it says that the server failed: its log knows why."""
        if line.startswith('data: {"error"'):
            why = self.server.last_words() if self.server is not None else ""
            raise EngineError(f"the vLLM server failed while generating: {line[6:300]}. {why}".rstrip())
        return line

    def _require_alive(self) -> None:
        if self.server is not None and not self.server.alive:
            raise EngineError(f"the vLLM server died. {self.server.last_words()}")

    def _refused(self, path: str, response: Any) -> EngineError:
        """What the server said, and where it failed itself, what its log says."""
        text = f"the vLLM server answered {response.status_code} to {path}: {response.text[:500]}"
        if response.status_code == 404 and path.strip("/") in _RELOAD:
            text += ". These routes are there when the server was started with VLLM_SERVER_DEV_MODE=1"
        if response.status_code >= 500 and self.server is not None:
            text += f". {self.server.last_words()}"
        return EngineError(text)

    def _lost(self, error: Exception) -> EngineError:
        """Why there is no answer, as far as it can be known."""
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        if self.server is None:
            return EngineError(f"the vLLM server at {self.url} did not answer ({what})")
        if self.server.alive:
            return EngineError(f"the vLLM server lives but did not answer ({what})")
        return EngineError(f"the vLLM server died ({what}). {self.server.last_words()}")


def hash_of_weights(folder: Path, dtype: torch.dtype) -> str:
    """A hash of the safetensors in `folder`, in the type that the server computes in."""
    from safetensors import safe_open

    seen = WeightHash()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                seen.add(tensors.get_tensor(name).to(dtype))
    return seen.digest()


def require_httpx() -> Any:
    """The client library, an extra. Raises ConfigError where it is missing."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("engine.kind = 'vllm' needs httpx: pip install 'stepladder[openai]'") from error
    return httpx


def start(
    python: str,
    export: Callable[[Path], object],
    *,
    dtype: torch.dtype,
    max_context: int,
    options: Mapping[str, Any] | None = None,
    start_seconds: float = 300.0,
    deadline: float = 120.0,
) -> Control:
    """Start a server on the policy's weights and wait until it serves.

    Raises:
        ConfigError: no such interpreter, an option that may not be set, httpx is missing.
        EngineError: it ended or did not answer within `start_seconds`, with the end of its log.
    """
    require_httpx()
    name = str(dtype).removeprefix("torch.")
    server = VllmServer(python, export, dtype=name, max_context=max_context, options=options)
    try:
        control = Control(dtype=dtype, server=server, deadline=deadline)
        server.wait(control.answers, start_seconds)
        control.loaded = hash_of_weights(server.model, dtype)
    except BaseException:
        server.close()
        raise
    return control


def connect(url: str, *, dtype: torch.dtype, max_context: int, deadline: float = 120.0) -> Control:
    """The line to a server that runs already. Raises EngineError where nothing fit answers."""
    control = Control(dtype=dtype, url=url.rstrip("/").removesuffix("/v1"), deadline=deadline)
    control.model, longest = control.served()
    if longest <= max_context:
        raise ConfigError(
            f"the server at {url} holds {longest} tokens, and scoring a context of rollout.max_context = "
            f"{max_context} takes one more; start it with --max-model-len {max_context + 1}"
        )
    return control
