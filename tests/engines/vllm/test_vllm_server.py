"""The server as a child: its options, its end in every case, and what is said when it does not start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_vllm
import pytest
import torch
from fake_vllm import VOCABULARY, scores

from stepladder.engines.vllm.control import Control
from stepladder.engines.vllm.engine import VllmEngine
from stepladder.engines.vllm.server import VllmServer, command_line
from stepladder.errors import ConfigError, EngineError
from stepladder.types import Sampling

FAKE = (fake_vllm.__file__,)


def export(folder: Path) -> None:
    folder.mkdir()
    (folder / "weight.json").write_text(json.dumps(0.7))


def started(**options: object) -> tuple[VllmServer, Control]:
    server = VllmServer(
        sys.executable, export, dtype="float32", max_context=64, options=options, command=FAKE
    )
    control = Control(dtype=torch.float32, server=server, deadline=10.0)
    server.wait(control.answers, 30)
    return server, control


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgid = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgid) == group and state != "Z":
                found.append(int(entry.name))
    return found


def empty(group: int, seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while members(group) and time.monotonic() < until:
        time.sleep(0.05)
    return not members(group)


linux = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")


@linux
def test_close_ends_the_server_its_children_and_its_folder() -> None:
    server, control = started()
    group = server._process.pid
    assert len(members(group)) == 3  # the guard, the server, and what the server started
    assert server.folder.stat().st_mode & 0o077 == 0  # nobody else reaches the socket
    control.kill()
    assert empty(group)
    assert not server.folder.exists()
    server.close()  # idempotent


@linux
def test_the_server_dies_with_us_even_by_kill_9() -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from test_vllm_server import started\n"
        "server, _ = started(); print(server._process.pid, server.folder, flush=True); time.sleep(60)"
    )
    here = str(Path(__file__).parent)
    root = str(Path(__file__).parents[3])
    us = subprocess.Popen(
        [sys.executable, "-c", code, here], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}
    )
    assert us.stdout is not None
    number, _, folder = us.stdout.readline().decode().strip().partition(" ")
    group = int(number)
    assert Path(folder, "model").is_dir()
    assert len(members(group)) == 3
    us.send_signal(signal.SIGKILL)
    us.wait()
    us.stdout.close()
    assert empty(group)
    assert not Path(folder).exists()  # the weights of a large model would stay until somebody looks


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineError, match=r"(?s)ended while it started.*cannot be served.*exit code 7"):
        _closed_after(fault="no start", seconds=30)


def test_a_server_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(EngineError, match=r"did not answer within 0\.5 s.*engine\.start_seconds"):
        _closed_after(fault="slow start", seconds=0.5)


def _closed_after(*, fault: str, seconds: float) -> None:
    server = VllmServer(
        sys.executable, export, dtype="float32", max_context=64, options={"fault": fault}, command=FAKE
    )
    control = Control(dtype=torch.float32, server=server)
    try:
        server.wait(control.answers, seconds)
    finally:
        control.kill()


def test_a_server_that_dies_while_generating_is_named_with_its_log() -> None:
    with asyncio.Runner() as runner:
        server, control = started()
        engine = VllmEngine(
            control,
            export=export,
            scores=lambda ids, temperature: scores(0.7, ids, temperature),
            vocabulary=VOCABULARY,
            max_context=64,
            dtype=torch.float32,
        )
        try:
            os.killpg(server._process.pid, signal.SIGKILL)
            with (
                engine.session() as session,
                pytest.raises(EngineError, match=r"(?s)the vLLM server died.*The end of its log"),
            ):
                runner.run(session.generate([1], Sampling(max_tokens=4)))
            with pytest.raises(EngineError, match="the vLLM server died"):
                engine.sync(1)
        finally:
            runner.run(engine.close())


def test_a_server_whose_core_died_says_what_its_log_says() -> None:
    """The process that answers lives on for a while, and knows no more than "see above"."""
    server, control = started(fault="core died")
    try:
        with pytest.raises(EngineError, match=r"(?s)answered 500 to /collective_rpc.*The end of its log"):
            control.reload(server.model)
    finally:
        control.kill()


def test_last_words_begin_with_the_first_cause() -> None:
    """vLLM's processes die one of the other; the end of the log is about the last of them."""
    server, control = started()
    try:
        cause = "(EngineCore pid=7) ERROR 11-30 [core.py:1] RuntimeError: head size 8 is not supported"
        said = [f"(APIServer pid=6) ERROR EngineDeadError: see above {k}" for k in range(40)]
        server.log.write_text("\n".join(["INFO ValueError: only said", cause, *said]))
        words = server.last_words().splitlines()
        assert words[1] == f"    {cause}"
        assert words[-1] == f"    {said[-1]}"
        assert len(words) == 1 + 2 + 25
    finally:
        control.kill()


def test_options_become_a_command_line_and_ours_cannot_be_overridden() -> None:
    options = {"max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False, "quantization": "x"}
    assert command_line(options) == [
        "--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching", "--quantization", "x"
    ]  # fmt: skip
    assert command_line({"compilation_config": {"level": 0}}) == ["--compilation-config", '{"level": 0}']
    for name in ("logprobs_mode", "logprobs-mode", "generation_config", "host", "port", "max_model_len"):
        with pytest.raises(ConfigError, match=f"engine.options.{name}.*is set by the engine itself"):
            command_line({name: "x"})


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'/no/python' is no program.*make_vllm_env"):
        VllmServer("/no/python", export, dtype="float32", max_context=64)


def test_the_server_is_asked_for_what_the_engine_relies_on() -> None:
    server, control = started(max_num_seqs=8)
    try:
        said = server.log.read_text().splitlines()[0]
        for wanted in (
            "--logprobs-mode processed_logprobs",
            "--generation-config vllm",
            "--max-model-len 65",
            "--dtype float32",
            "--max-num-seqs 8",
        ):
            assert wanted in said
    finally:
        control.kill()
