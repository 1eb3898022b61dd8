"""inspect, chat and eval: what a person sees, on a tiny run and on a real HTTP endpoint."""

import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from stepladder.commands import chat as chat_module
from stepladder.commands.evaluate import evaluate_model
from stepladder.commands.inspect import inspect_recipe
from stepladder.errors import ConfigError
from stepladder.evaluation.asked import Asked
from stepladder.ladder import train
from stepladder.recipe.config import load_recipe
from stepladder.run.progress import Display


def tiny(tmp_path, *overrides):
    small = ["rl.steps=1", "rl.tasks_per_step=4", "rl.group_size=4", "sft.epochs=1", "sft.demonstrations=64"]
    small += ["evaluation.raw=0", "evaluation.tasks=8", f"run.out={tmp_path}", "run.name=run"]
    return load_recipe("hidden_digit", [*small, *overrides])


def test_inspect_shows_who_wrote_what_and_the_advantages(tmp_path):
    console = Console(record=True, width=100, file=io.StringIO())
    inspect_recipe(tiny(tmp_path), samples=2, console=console)
    text = console.export_text()
    assert "sft: 64 samples to train on" in text
    assert "rl: 2 groups of 4" in text
    assert "advantage" in text
    assert not (tmp_path / "run").exists()  # nothing was trained, nothing written


def test_eval_of_a_run_folder_and_of_an_unfinished_one(tmp_path, capsys):
    folder = train(tiny(tmp_path), display=Display(quiet=True))
    out = tmp_path / "played" / "eval.jsonl"
    asked = Asked("hidden_digit", tasks=10, temperature=0.0)  # its limits are those it was trained with
    (played,) = evaluate_model(str(folder), asked, out=out)
    assert played.result.n == 10
    assert "95% interval" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 10
    (folder / "final" / "model.safetensors").unlink()
    (folder / "final").rename(folder / "gone")
    with pytest.raises(ConfigError, match="stepladder resume"):
        evaluate_model(str(folder), Asked("hidden_digit", tasks=1, temperature=0.0))


@contextmanager
def endpoint(answer):
    """A chat endpoint on the loopback; `answer(body)` gives (status, JSON)."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append((self.path, body))
            status, data = answer(body)
            payload = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_endpoint(url, tasks=3):
    limits = ["rollout.max_turns=3"]
    asked = Asked("calculator", limits, tasks=tasks, temperature=0.0, endpoint_model="some-model")
    (played,) = evaluate_model(url, asked)
    return played.result


def clever(body):
    """Calls the calculator once, then repeats what it said."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return 200, {
            "choices": [{"message": {"content": f"Answer: {last['content']}"}, "finish_reason": "stop"}]
        }
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "calculator", "arguments": json.dumps({"expression": "6*7"})}
    return 200, {
        "choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]
    }


def test_an_endpoint_plays_episodes_with_tools():
    with endpoint(clever) as (url, bodies):
        result = run_endpoint(url)
    assert result.n == 3
    assert result.tool_rate == 1.0
    assert result.failed == 0
    path, first = bodies[0]
    assert path == "/v1/chat/completions"
    assert first["model"] == "some-model"
    assert first["tools"][0]["function"]["name"] == "calculator"
    # The second request carries the call and its result back, arguments as a JSON string.
    second = next(body for _, body in bodies if body["messages"][-1]["role"] == "tool")
    assert second["messages"][-1]["content"] == "42"
    assert json.loads(second["messages"][-2]["tool_calls"][0]["function"]["arguments"]) == {
        "expression": "6*7"
    }


@pytest.mark.parametrize("reply", [(500, {"error": "busy"}), (200, b"not json"), (200, {"choices": []})])
def test_an_endpoint_that_fails_is_reported_apart_and_stays_in_the_denominator(reply):
    with endpoint(lambda body: reply) as (url, bodies):
        result = run_endpoint(url, tasks=2)
    assert (result.n, result.solved, result.failed) == (2, 0, 2)
    assert len(bodies) == 4  # each task was tried again once


def test_malformed_arguments_from_an_endpoint_become_a_message_to_the_model():
    def broken(body):
        if body["messages"][-1]["role"] == "tool":
            assert "could not be read" in body["messages"][-1]["content"]
            return 200, {"choices": [{"message": {"content": "Answer: 0"}, "finish_reason": "stop"}]}
        call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"a":'}}
        return 200, {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}

    with endpoint(broken) as (url, _):
        result = run_endpoint(url, tasks=1)
    assert (result.failed, result.tool_rate) == (0, 0.0)


def test_an_endpoint_needs_a_model_name():
    with pytest.raises(ConfigError, match="--endpoint-model"):
        evaluate_model("http://127.0.0.1:9/v1", Asked("calculator", tasks=1, temperature=0.0))


def test_chat_answers_and_starts_over(tmp_path, monkeypatch, capsys):
    folder = train(tiny(tmp_path), display=Display(quiet=True))
    lines = iter(["?", "/new", "?"])

    def read(self, prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(chat_module.Console, "input", read)
    chat_module.chat_with(str(folder), environment=None, temperature=0.0, max_tokens=4)
    printed = capsys.readouterr().out
    assert printed.count("model: ") == 2
    assert "(new conversation)" in printed


def test_chat_without_an_environment_says_what_to_give():
    with pytest.raises(ConfigError, match="--env calculator"):
        chat_module.chat_with("smollm2-135m-instruct", environment=None, temperature=0.0, max_tokens=4)
