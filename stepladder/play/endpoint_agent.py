"""Any model behind an OpenAI-compatible chat endpoint as an agent: for evaluation, never for training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepladder.data.chat.parsers import read_arguments
from stepladder.errors import ConfigError, EngineError
from stepladder.play.agent import Act, Record
from stepladder.types import Message, Tool, ToolCall


class EndpointAgent:
    """A model behind an OpenAI-compatible /chat/completions; it gives no token ids to train on."""

    def __init__(self, client: Any, model: str, *, temperature: float, max_tokens: int) -> None:
        self.client, self.model = client, model
        self.temperature, self.max_tokens = temperature, max_tokens
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self.messages, self.tools = list(messages), [tool.to_dict() for tool in tools]

    async def act(self, seed: int) -> Act:
        import httpx

        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_wire(m) for m in self.messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": seed % 2**31,
        }
        if self.tools:
            body["tools"] = self.tools
        try:
            # The client's own time-out is for each piece of an answer: one that drips never ends.
            async with asyncio.timeout(self.client.timeout.read):
                response = await self.client.post("chat/completions", json=body)
        except TimeoutError:
            seconds = self.client.timeout.read
            raise EngineError(
                f"the endpoint did not answer within {seconds:g} s (rollout.deadline)"
            ) from None
        except httpx.HTTPError as error:
            raise EngineError(f"the endpoint did not answer: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            hint = ""
            if response.status_code == 400 and self.tools and "tool" in response.text:
                hint = (
                    ". It cannot read tool calls; a vLLM server can when it is started with "
                    "--enable-auto-tool-choice --tool-call-parser NAME (hermes for our own tool format)"
                )
            raise EngineError(f"the endpoint answered {response.status_code}: {response.text[:300]}{hint}")
        try:
            choice = response.json()["choices"][0]
            message = _from_wire(choice["message"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise EngineError(
                f"the endpoint's answer is not a chat completion: {response.text[:300]}"
            ) from error
        self.messages.append(message)
        return Act(message, "length" if choice.get("finish_reason") == "length" else "stop")

    def observe(self, messages: Sequence[Message]) -> None:
        self.messages += messages

    def record(self, trajectory_id: str, group_id: str) -> Record:
        return Record(tuple(self.messages))

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """Cut at four characters per token, since there is no tokenizer."""
        return text[: 4 * max_tokens], len(text) // 4

    def close(self) -> None:
        """Do nothing: the client is shared, and whoever made it closes it."""


def endpoint_client(url: str, *, deadline: float) -> Any:
    """Return an httpx client for `url`, with the key OPENAI_API_KEY. Raises ConfigError without httpx."""
    import os

    try:
        import httpx
    except ImportError as error:
        raise ConfigError("evaluating an endpoint needs httpx: pip install 'stepladder[openai]'") from error
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    # Servers close a connection that was idle for 5 s (uvicorn); one used again at that moment is lost. The
    # loop bounds how many episodes are played at once, so the client need not.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    return httpx.AsyncClient(base_url=url.rstrip("/") + "/", timeout=deadline, headers=headers, limits=limits)


async def require_endpoint(client: Any, url: str) -> None:
    """Raise ConfigError where nothing takes a connection at `url`; whatever answers there is taken."""
    import httpx

    try:
        async with asyncio.timeout(10.0):  # an answer that drips never ends by the client's own time-out
            await client.get("models", timeout=5.0)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise ConfigError(
            f"nothing answers at {url} ({type(error).__name__}: {error}); start the server, or correct the "
            "address: it is the part before /chat/completions, such as http://localhost:8000/v1"
        ) from error
    except (httpx.HTTPError, TimeoutError):  # it took the connection; need not know this path, or be quick
        pass


def _wire(message: Message) -> dict[str, Any]:
    out = message.to_dict()
    for call in out.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return out


def _from_wire(data: Any) -> Message:
    """Return what a server says the model said. Raises TypeError or KeyError where that is not a message.

    A call that cannot be read is the model's mistake, which it is shown.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"a message must be an object, not {type(data).__name__}")
    calls = []
    for call in data.get("tool_calls") or []:
        name, given = call["function"].get("name"), call["function"].get("arguments")
        text = given if isinstance(given, str) else json.dumps(given)  # some servers send the object itself
        arguments, problem = read_arguments(_valid(text) if given else "{}")
        if not isinstance(name, str) or not name:
            problem = "the call has no name"
        calls.append(
            ToolCall(
                _valid(name) if isinstance(name, str) else "",
                arguments,
                id=_valid(str(call.get("id") or "")),
                error=problem,
                raw=_valid(text),
            )
        )
    content = data.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"content must be a text, not {type(content).__name__}")
    return Message("assistant", _valid(content), tool_calls=tuple(calls))


def _valid(text: str) -> str:
    """Return `text` without lone surrogates, which JSON can carry and no file or request can."""
    return text.encode("utf-8", "replace").decode()
