"""A small server that answers as vLLM does, on a made-up model of 16 tokens, with faults on demand.

In a thread: `with FakeVllm() as fake:`. As a program it takes vLLM's options and listens on `--uds`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

VOCABULARY = 16


def distribution(weight: float, last: int, temperature: float) -> list[float]:
    """log p of each of the 16 tokens after `last`: softmax of 2 sin(weight (last + 1) (token + 1)) / T."""
    logits = [2 * math.sin(weight * (last + 1) * (v + 1)) / (temperature or 1.0) for v in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [x - total for x in logits]


def scores(weight: float, ids: Sequence[int], temperature: float) -> list[float]:
    return [distribution(weight, a, temperature)[b] for a, b in itertools.pairwise(ids)]


class Model:
    """What the server holds, and which fault it shows."""

    def __init__(self, weight: float = 0.7, fault: str = "", delay: float = 0.0) -> None:
        self.weight, self.fault, self.delay = weight, fault, delay
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.release = threading.Event()  # ends the fault "hang"

    def load(self, folder: Path) -> None:
        self.weight = json.loads((folder / "weight.json").read_text())

    def sample(self, body: dict[str, Any]) -> list[tuple[int, float]]:
        generator, last, drawn = random.Random(body["seed"]), body["prompt"][-1], []
        while len(drawn) < body["max_tokens"]:
            table = distribution(self.weight, last, body["temperature"])
            if self.fault == "penalty":
                table = [x - 3.0 * (v % 2) for v, x in enumerate(table)]
                total = math.log(sum(map(math.exp, table)))
                table = [x - total for x in table]
            last = generator.choices(range(VOCABULARY), [math.exp(x) for x in table])[0]
            if body["temperature"] == 0:
                last = max(range(VOCABULARY), key=table.__getitem__)
            said = table[last]
            if self.fault == "raw":
                said = distribution(self.weight, ([*body["prompt"], *[i for i, _ in drawn]])[-1], 1.0)[last]
            drawn.append((last, said))
            if last in body["stop_token_ids"]:
                break
        return drawn


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return "client"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                return self.answer({"data": [{"id": "fake", "max_model_len": 65}]})
            self.answer({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            model.calls.append(self.path)
            if self.path == "/collective_rpc":
                if model.fault == "core died":
                    return self.answer({"error": {"message": "EngineCore encountered an issue"}}, 500)
                if model.fault != "deaf":
                    model.load(Path(body["kwargs"]["weights_path"]))
                self.answer({"results": [None]})
            elif self.path == "/reset_prefix_cache":
                self.answer({"success": model.calls.count(self.path) != 1})  # refuses the first time
            elif self.path == "/v1/completions":
                model.requests.append(body)
                if body["stream"]:
                    self.stream(body)
                else:
                    ids = body["prompt"]
                    rows = [{str(i): {"logprob": x}} for i, x in zip(ids[1:], scores(model.weight, ids, 1.0))]
                    self.answer({"choices": [{"prompt_logprobs": [None, *rows]}]})
            else:
                self.answer({"detail": "Not Found"}, 404)

        def answer(self, data: Any, code: int = 200) -> None:
            text = json.dumps(data).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for line in self.chunks(body):
                    self.wfile.write(f"data: {line}\n\n".encode())
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                model.calls.append("cut")

        def chunks(self, body: dict[str, Any]) -> Any:
            drawn = model.sample(body)
            prompt = body["prompt"]
            for n, (token, said) in enumerate(drawn):
                if model.fault == "die" and n == 2:
                    os._exit(3)
                if model.fault == "hang" and n == 2:
                    model.release.wait(30)
                if model.fault == "broken off" and n == 2:
                    return
                if model.fault == "error" and n == 2:
                    yield json.dumps({"error": {"message": "EngineCore encountered an issue", "code": 500}})
                    return
                time.sleep(model.delay)
                last = n + 1 == len(drawn)
                reason = None
                if last:
                    reason = "stop" if token in body["stop_token_ids"] else "length"
                values: list[Any] = [said]
                if model.fault in ("nan", "none", "absent"):
                    values = [{"nan": math.nan, "none": None, "absent": -9999.0}[model.fault]]
                if model.fault == "own stop" and n == 2:
                    reason, last = "stop", True
                name = token + 1 if model.fault == "wrong ids" else token
                choice = {
                    "token_ids": [token],
                    "prompt_token_ids": (prompt[1:] if model.fault == "cut prompt" else prompt)
                    if n == 0
                    else None,
                    "logprobs": {"tokens": [f"token_id:{name}"], "token_logprobs": values},
                    "finish_reason": reason,
                }
                yield json.dumps({"choices": [choice]})
                if last:
                    break
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 1}}
            yield json.dumps({"choices": [], "usage": usage})
            yield "[DONE]"

    return Handler


class _Tcp(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class FakeVllm:
    """The server in a thread, on a random port of the loopback."""

    def __init__(self, fault: str = "", delay: float = 0.0) -> None:
        self.model = Model(fault=fault, delay=delay)

    def __enter__(self) -> FakeVllm:
        self.server = _Tcp(("127.0.0.1", 0), handler(self.model))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.model.release.set()
        self.server.shutdown()
        self.server.server_close()


def main(arguments: list[str]) -> None:
    options = dict(itertools.pairwise(arguments))
    print("arguments:", " ".join(arguments), flush=True)
    fault = options.get("--fault", "")
    if fault == "no start":
        print("ValueError: this model cannot be served", flush=True)
        sys.exit(7)
    if fault == "slow start":
        time.sleep(60)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine process
    model = Model(fault=fault)
    model.load(Path(options["--model"]))
    with _Unix(options["--uds"], handler(model)) as server:
        server.serve_forever(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
