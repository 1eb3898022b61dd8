"""The run's event loop: it goes on while the main thread computes, and Ctrl-C cleans up first."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from stepladder.play.loop_thread import LoopThread


def test_a_deadline_fires_while_the_main_thread_computes() -> None:
    async def tool() -> str:
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0.05)
        except TimeoutError:
            return "in time"
        return "late"

    with LoopThread() as loop:
        answer = loop.start(tool())
        busy = time.monotonic()
        while time.monotonic() - busy < 0.3:  # a backward pass that never awaits
            sum(range(1000))
        assert answer.done()
        assert answer.result() == "in time"


def test_results_and_errors_come_back() -> None:
    async def double(x: int) -> int:
        return 2 * x

    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    with LoopThread() as loop:
        assert loop.run(double(4)) == 8
        assert loop.call(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError, match="a bug"):
            loop.run(broken())
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(double(1))


def test_ctrl_c_cancels_and_waits_for_the_cleaning_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append("done")

    with LoopThread() as loop:
        timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert cleaned == ["done"]
        assert time.monotonic() - began < 30  # not after the work was over anyway


def test_close_cancels_what_still_runs() -> None:
    ended: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    loop = LoopThread()
    loop.start(forever())
    time.sleep(0.05)
    loop.close()
    loop.close()
    assert ended == [True]


@pytest.mark.parametrize("exit_", [SystemExit, KeyboardInterrupt])
def test_a_task_that_exits_does_not_take_the_loop_with_it(exit_: type[BaseException]) -> None:
    """asyncio ends `run_forever` when a task ends by SystemExit: everyone else would wait for ever."""

    async def spawn() -> None:
        async def quit_() -> None:
            raise exit_(3)

        await asyncio.create_task(quit_())

    with LoopThread() as loop:
        failed = loop.start(spawn())
        assert isinstance(failed.exception(timeout=10), exit_)
        assert loop.start(asyncio.sleep(0, "alive")).result(timeout=10) == "alive"


def test_work_that_something_else_cancels_is_named() -> None:
    async def leaves() -> None:
        raise asyncio.CancelledError

    with (
        LoopThread() as loop,
        pytest.raises(RuntimeError, match=r"code that is not stepladder's.*leaves\(\)"),
    ):
        loop.run(leaves())
