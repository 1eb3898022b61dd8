"""eval: an endpoint that is not there, and the rewards of the recipe."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from spine import digit_recipe
from test_commands import clever, endpoint
from told_episodes import episode

from stepladder.commands.chat import chat_with
from stepladder.commands.evaluate import evaluate_model
from stepladder.commands.output import require_writable, write_trajectories
from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation
from stepladder.evaluation.asked import Asked
from stepladder.ladder import train
from stepladder.run.progress import Display
from stepladder.types import Task


def half(answer: str, task: Task) -> float:
    """A reward function, named by the path of this file."""
    return 0.5


def evaluated(model: str, environment: str, *overrides: str, out: Path | None = None) -> Evaluation:
    asked = Asked(environment, overrides, tasks=2, temperature=0.0, endpoint_model="some-model")
    (played,) = evaluate_model(model, asked, out=out)
    return played.result


def test_an_endpoint_where_nothing_listens_stops_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, never listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ConfigError, match=rf"nothing answers at {url}.*http://localhost:8000/v1"):
            evaluated(url, "calculator")
    assert "solved" not in capsys.readouterr().out


def test_an_out_file_that_cannot_be_written_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
        evaluated("no-such-model", "calculator", out=tmp_path)


def test_a_report_folder_that_cannot_be_written_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=r"--report .*file.eval cannot be written.*try --report eval"):
        evaluate_model("no-such-model", Asked("calculator"), report=taken / "eval")


def test_an_out_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "eval.jsonl"
    one = episode([1.0])
    write_trajectories(out, [one, one])
    written = out.read_text()
    assert [json.loads(line)["id"] for line in written.splitlines()] == ["t", "t"]
    require_writable(out)
    require_writable(tmp_path / "other.jsonl")
    (tmp_path / "recipe.toml").write_text("")  # from here on a run's folder
    require_writable(tmp_path / "other.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a file of that run itself; try --out .*eval"):
        require_writable(tmp_path / "metrics.jsonl")
    (tmp_path / "recipe.toml").unlink()
    broken: Any = [one, "no trajectory"]
    with pytest.raises(AttributeError):
        write_trajectories(out, broken)
    assert out.read_text() == written
    assert [p.name for p in tmp_path.iterdir()] == ["eval.jsonl"]


def test_out_may_be_a_pipe_or_a_link(tmp_path: Path) -> None:
    """What is renamed into their place would replace the pipe (/dev/stdout is one), or the link."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe)
        write_trajectories(pipe, [episode([1.0])])
        assert json.loads(os.read(reader, 1 << 16))["id"] == "t"
    finally:
        os.close(reader)
    link, file = tmp_path / "link.jsonl", tmp_path / "file.jsonl"
    link.symlink_to(file)
    require_writable(link)
    write_trajectories(link, [episode([1.0])])
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 1


def test_why_episodes_failed_is_printed_and_a_server_that_reads_no_calls_is_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM refuses tools with these words when it was started without a parser."""
    refusal = {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}
    with endpoint(lambda body: (400, refusal)) as (url, _):
        assert evaluated(url, "calculator").failed == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "the first failure, at the engine: the endpoint answered 400" in said
    assert "--tool-call-parser NAME" in said


def said(**message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": "", **message}, "finish_reason": "stop"}]
    }


def called(name: Any, arguments: Any) -> dict[str, Any]:
    return said(tool_calls=[{"id": "1", "function": {"name": name, "arguments": arguments}}])


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": "hi"}]},
        {"choices": ["hi"]},
        said(content=5),
        said(tool_calls="abc"),
        said(tool_calls=[{"id": "1"}]),
        ("[" * 100_000).encode(),
    ],
)
def test_what_is_no_chat_completion_is_a_failure_of_the_engine(answer: Any) -> None:
    with endpoint(lambda body: (200, answer)) as (url, _):
        result = evaluated(url, "calculator")
    assert [t.failure.boundary for t in result.trajectories if t.failure] == ["engine"] * 2


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (called("calculator", "[" * 100_000), "not valid JSON"),
        (called("calculator", '{"expression": ' + "[" * 900 + "]" * 900 + "}"), "nested more than 64 deep"),
        (called("calculator", "[1]"), "must be a JSON object"),
        (called(None, "{}"), "has no name"),
        (called("calculator\ud800", "{}"), "calculator?"),
        (called("calculator", {"expression": "6 * 7"}), "42"),  # no mistake: some servers decode it
    ],
)
def test_a_call_that_cannot_be_read_is_answered(answer: Any, problem: str) -> None:
    with endpoint(lambda body: (200, answer)) as (url, bodies):
        result = evaluated(url, "calculator", "rollout.max_turns=2")
    assert result.failed == 0
    (told,) = [m["content"] for m in bodies[-1][1]["messages"] if m["role"] == "tool"]
    assert problem in told


def test_content_in_parts_is_read() -> None:
    with endpoint(lambda body: (200, said(content=[{"type": "text", "text": "\ud800five"}]))) as (url, _):
        result = evaluated(url, "calculator")
    assert {t.messages[-1].content for t in result.trajectories} == {"?five"}


def test_an_answer_that_drips_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()
        thread = threading.Thread(target=drip, args=(server, stop), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        try:
            result = evaluated(url, "calculator", "rollout.deadline=1")
        finally:
            stop.set()
            thread.join()
    assert ["within 1 s" in t.failure.message for t in result.trajectories if t.failure] == [True, True]


def drip(server: socket.socket, stop: threading.Event) -> None:
    """Hang up on the first connection, which asks who is there; then a byte each 0.1 s, for ever."""
    server.accept()[0].close()
    server.settimeout(0.1)
    with contextlib.ExitStack() as lines:
        open_lines: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                open_lines.append(lines.enter_context(server.accept()[0]))
                open_lines[-1].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            for line in open_lines:
                with contextlib.suppress(OSError):  # the client may have given up
                    line.sendall(b" ")


def test_an_endpoint_is_scored_by_the_rewards_asked_for() -> None:
    """`GET models` of this server is no 200, which does not matter."""
    with endpoint(clever) as (url, _):
        result = evaluated(url, "calculator", f"environment.rewards=['{__file__}:half']")
    assert [t.score.parts["half"] for t in result.trajectories] == [0.5, 0.5]


def test_a_run_that_trained_on_files_alone_is_played_in_any_world(tmp_path: Path) -> None:
    """It has no [environment], whose options and rewards it would share."""
    data = tmp_path / "said.jsonl"
    said = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "S"}]}\n'
    data.write_text(said)
    files = ("environment=null", "rl=null", "sft.demonstrations=null", f"sft.data={data}", "sft.validation=0")
    recipe = digit_recipe(tmp_path, "run", *files, "sft.epochs=1")
    path = train(recipe, display=Display(quiet=True))
    result = evaluated(str(path), "hidden_digit")
    assert (result.n, result.failed) == (2, 0)
    assert all(turn.sampling.max_tokens == 3 for t in result.trajectories for turn in t.turns)  # its limits
    with pytest.raises(ConfigError, match="--env calculator"):
        chat_with(str(path), environment=None, temperature=0.0, max_tokens=4)


def test_a_run_is_evaluated_with_the_rewards_of_its_training(tmp_path: Path) -> None:
    short = ("rl=null", "sft.epochs=1", "evaluation.raw=0", "evaluation.tasks=2")
    recipe = digit_recipe(tmp_path, "run", *short, f"environment.rewards=['{__file__}:half']")
    path = train(recipe, display=Display(quiet=True))
    result = evaluated(str(path), "hidden_digit")
    assert [t.score.parts["half"] for t in result.trajectories] == [0.5, 0.5]
