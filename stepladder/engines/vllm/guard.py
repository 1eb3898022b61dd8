"""Runs a server as a child and ends it, with all its own children, when the process that asked is gone.

    python guard.py FOLDER COMMAND ARGUMENT...

Standard input is a pipe whose other end the asking process holds and never writes to. It closes when that
process closes it or dies in any way, kill -9 included: end-of-file here means "nobody needs the server any
more", and the folder (its model, its socket, its log) goes with it. Started in a session of its own, so that
one signal reaches everything. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE = 5.0  # seconds between asking the server to end and killing it


unneeded = threading.Event()


def main() -> None:
    folder, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group, this process included
    server = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, preexec_fn=_take_signals
    )
    threading.Thread(target=_until_unneeded, args=(server,), daemon=True).start()
    code = server.wait()
    print(f"the server ended with exit code {code}", flush=True)
    if unneeded.is_set():  # otherwise the log says why it died
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _take_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _until_unneeded(server: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    unneeded.set()
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)
    server.kill()


if __name__ == "__main__":
    main()
