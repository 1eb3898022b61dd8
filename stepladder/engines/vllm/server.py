"""A vLLM server as a child process: started with a deadline, reached by a private socket, gone at the end.

The socket is a file in a folder that only this user can enter. A TCP port would not do: vLLM's API key
guards the paths under /v1, and not those that load weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepladder.engines.vllm import guard
from stepladder.errors import ConfigError, EngineError

MODEL = "policy"  # the name that the server serves the policy under

# What the engine sets itself; another value would break what it promises.
_FIXED = {
    "model", "served_model_name", "uds", "host", "port", "dtype", "max_model_len", "api_key",
    "logprobs_mode", "generation_config", "enable_prompt_tokens_details", "tokenizer", "root_path",
}  # fmt: skip

_CAUSE = re.compile(r"\bERROR\b.*\b\w*(Error|Exception): \S")

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights and empty the prefix cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_DEFAULTS = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; a build for the CPU takes half of the memory otherwise
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class VllmServer:
    """Owns a process group and a temporary folder. Close it; if this process dies the server does too.

    Args:
        python: the interpreter of the environment where vllm is installed.
        export: writes the model to begin with to a folder, in Hugging Face's format.
        dtype, max_context: what the server computes in, and prompt and generation together.
        options: more command-line options, `{"max_num_seqs": 64, "enforce_eager": True}`.
        command: what to run instead of vLLM's own entry point (tests); it gets the same options.

    Raises:
        ConfigError: no such interpreter, or an option that the engine sets itself.
    """

    def __init__(
        self,
        python: str | Path,
        export: Callable[[Path], object],
        *,
        dtype: str,
        max_context: int,
        options: Mapping[str, Any] | None = None,
        command: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server"),
    ) -> None:
        flags = command_line(options or {})
        interpreter = shutil.which(Path(python).expanduser())
        if interpreter is None:
            raise ConfigError(
                f"engine.python = {str(python)!r} is no program; give the interpreter of an environment "
                "with vllm, such as /opt/vllm/bin/python (bench/make_vllm_env.sh makes one)"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="stepladder-vllm-"))  # mode 0700
        self.socket = self.folder / "socket"
        self.log = self.folder / "log"
        self.model = self.folder / "model"
        try:
            export(self.model)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        line = [interpreter, *command, "--model", str(self.model), "--served-model-name", MODEL]
        line += ["--uds", str(self.socket), "--dtype", dtype]
        line += ["--max-model-len", str(max_context + 1)]  # scoring a full context samples one token more
        line += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        line += ["--enable-prompt-tokens-details", *flags]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", guard.__file__, str(self.folder), *line],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def listens(self) -> bool:
        """Does it take connections? (A server that loads its model has its socket, and refuses them.)"""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def wait(self, answers: Any, seconds: float) -> None:
        """Return when `answers()` is true. Raises EngineError when the server ends or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while not answers():
            if not self.alive:
                raise EngineError(f"the vLLM server ended while it started. {self.last_words()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server did not answer within {seconds:g} s; give it more time with "
                    f"engine.start_seconds, or look at what it said. {self.last_words()}"
                )
            time.sleep(0.1)

    def last_words(self, lines: int = 25) -> str:
        """The first error in the server's log and the log's end, for an error message.

        One of its processes dies of the cause; what the others say about it comes last.
        """
        with contextlib.suppress(OSError):
            log = self.log.read_text(errors="replace").splitlines()
            first = next((line for line in log if _CAUSE.search(line)), None)
            kept = log[-lines:]
            if first is not None and first not in kept:
                kept = [first, "...", *kept]
            return "The end of its log:\n" + "\n".join(f"    {line}" for line in kept)
        return "Its log is gone."

    def close(self) -> None:
        """End the server and everything it started; remove its folder. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(2 * guard.GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Options as vLLM's command line spells them.

    >>> command_line({"max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False})
    ['--max-num-seqs', '64', '--enforce-eager', '--no-enable-prefix-caching']

    Raises ConfigError for an option that the engine sets itself.
    """
    line: list[str] = []
    for name, value in options.items():
        if name.replace("-", "_") in _FIXED:
            raise ConfigError(
                f"engine.options.{name} = {value!r} is set by the engine itself; remove it (the context is "
                "rollout.max_context, the type engine.dtype)"
            )
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return line


def _environment() -> dict[str, str]:
    """Ours, without what would lead another interpreter to our packages."""
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return _DEFAULTS | ours | _ENVIRONMENT
