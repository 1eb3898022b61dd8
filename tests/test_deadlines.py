"""Foreign code under a deadline: where it runs, when the clock runs, and what is left behind."""

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest

from stepladder.deadlines import (
    CalledExit,
    CancelledItself,
    DeadlinePassed,
    _Threads,
    call_bounded,
    guarded,
)
from stepladder.errors import EnvironmentFault, RewardError, ToolError


def test_plain_async_and_inline_give_their_results():
    async def later(x):
        await asyncio.sleep(0)
        return x

    async def main():
        assert await call_bounded(lambda x: x + 1, (1,), deadline=5) == 2
        assert await call_bounded(later, (3,), deadline=5) == 3
        assert (
            await call_bounded(lambda: later(4), deadline=5) == 4
        )  # a plain function that gives an awaitable
        assert await call_bounded(lambda x: x, (), {"x": 5}, deadline=5, inline=True) == 5
        assert await call_bounded(later, (6,), deadline=5, inline=True) == 6

    asyncio.run(main())


def test_a_standing_event_loop_fires_no_deadline():
    # The loop is held for ten times the deadline while both tools need less than it.
    async def quick():
        for _ in range(5):  # so that it still has to wait when the loop wakes up again
            await asyncio.sleep(0.005)
        return "async"

    async def main():
        calls = [
            asyncio.create_task(call_bounded(quick, deadline=0.1)),
            asyncio.create_task(call_bounded(lambda: time.sleep(0.01) or "plain", deadline=0.1)),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(1.0)  # a backward pass on the loop's own thread
        return await asyncio.gather(*calls)

    assert asyncio.run(main()) == ["async", "plain"]


def test_waiting_for_a_thread_does_not_count(monkeypatch):
    # One thread, two calls of 0.2 s, a deadline of 0.3 s: the second starts late, and is not late.
    monkeypatch.setattr("stepladder.deadlines._threads", _Threads(1))

    async def main():
        calls = [call_bounded(lambda: time.sleep(0.2) or "done", deadline=0.3) for _ in range(2)]
        return await asyncio.gather(*calls)

    assert asyncio.run(main()) == ["done", "done"]


def test_abandoned_calls_give_their_place_to_others(monkeypatch):
    threads = _Threads(2)
    monkeypatch.setattr("stepladder.deadlines._threads", threads)
    release = threading.Event()

    async def main():
        hung = [call_bounded(release.wait, (30,), deadline=0.05) for _ in range(4)]
        outcomes = await asyncio.gather(*hung, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DeadlinePassed] * 4
        assert threads.abandoned == 4
        return await call_bounded(lambda: "alive", deadline=5)

    assert asyncio.run(main()) == "alive"
    release.set()


def test_many_calls_share_few_threads(monkeypatch):
    threads = _Threads(4)
    monkeypatch.setattr("stepladder.deadlines._threads", threads)
    seen = set()

    async def main():
        def note(i):
            seen.add(threading.get_ident())
            return i

        return await asyncio.gather(*(call_bounded(note, (i,), deadline=20) for i in range(200)))

    assert asyncio.run(main()) == list(range(200))
    assert 1 <= len(seen) <= 4


def test_cancelling_the_caller_leaves_nothing_running():
    cancelled = []

    async def slow():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main():
        for function in (slow, lambda: time.sleep(0.05)):
            call = asyncio.create_task(call_bounded(function, deadline=20))
            await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert cancelled == [True]


def test_a_coroutine_that_refuses_to_die_is_left():
    async def stubborn():
        for _ in range(2):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                continue

    async def main():
        with pytest.raises(DeadlinePassed):
            await call_bounded(stubborn, deadline=0.05)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_context_variables_reach_the_thread():
    variable = contextvars.ContextVar("variable", default="none")

    async def main():
        variable.set("here")
        return await call_bounded(variable.get, deadline=5)

    assert asyncio.run(main()) == "here"


def test_exit_and_stop_iteration_stay_inside_their_call():
    def stop():
        raise StopIteration(1)

    async def leave():
        sys.exit(4)

    async def main():
        with pytest.raises(CalledExit, match=r"sys.exit\(3\)"):
            await call_bounded(sys.exit, (3,), deadline=5)
        for inline in (False, True):
            with pytest.raises(CalledExit, match=r"sys.exit\(4\)"):
                await call_bounded(leave, deadline=5, inline=inline)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await call_bounded(stop, deadline=5)

    asyncio.run(main())


def test_guarded_names_the_place_and_keeps_programming_errors():
    def broken(error):
        raise error

    async def outcome(error, **kwargs):
        with pytest.raises(BaseException) as caught:
            await guarded(broken, (error,), {}, "reset() of Shop", deadline=5, **kwargs)
        return caught.value

    fault = asyncio.run(outcome(KeyError("tea")))
    assert isinstance(fault, EnvironmentFault)
    assert str(fault) == "reset() of Shop raised KeyError: 'tea'"
    assert isinstance(fault.__cause__, KeyError)
    assert isinstance(asyncio.run(outcome(OSError("disk"), error_class=RewardError)), RewardError)
    assert isinstance(asyncio.run(outcome(ToolError("as it is"))), ToolError)
    wrong = asyncio.run(outcome(AttributeError("typo")))
    assert isinstance(wrong, AttributeError)
    assert wrong.__notes__ == ["raised in reset() of Shop"]

    async def hang():
        with pytest.raises(EnvironmentFault, match=r"reset\(\) of Shop gave no result within 0.05 s"):
            await guarded(asyncio.sleep, (30,), {}, "reset() of Shop", deadline=0.05)

    asyncio.run(hang())


def test_a_hung_thread_does_not_keep_the_interpreter():
    code = (
        "import asyncio, time\n"
        "from stepladder.deadlines import call_bounded, DeadlinePassed\n"
        "async def main():\n"
        "    try: await call_bounded(time.sleep, (60,), deadline=0.1)\n"
        "    except DeadlinePassed: print('passed')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=True
    )
    assert (done.stdout, done.stderr) == ("passed\n", "")


def test_a_hung_to_thread_keeps_neither_the_interpreter_nor_the_others():
    """asyncio's own pool has a few threads, and is joined at exit."""
    code = (
        "import asyncio, time\n"
        "from stepladder.deadlines import DaemonExecutor, DeadlinePassed, call_bounded\n"
        "async def hang(): await asyncio.to_thread(time.sleep, 60)\n"
        "async def quick(): return await asyncio.to_thread(lambda: 'quick')\n"
        "async def main():\n"
        "    asyncio.get_running_loop().set_default_executor(DaemonExecutor())\n"
        "    hung = [asyncio.ensure_future(call_bounded(hang, deadline=1)) for _ in range(60)]\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(await call_bounded(quick, deadline=20))\n"
        "    errors = await asyncio.gather(*hung, return_exceptions=True)\n"
        "    print({type(error).__name__ for error in errors})\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=True
    )
    assert (done.stdout, done.stderr) == ("quick\n{'DeadlinePassed'}\n", "")


def test_a_call_that_cancels_itself_is_a_failure_of_that_call():
    """Passed on, it would look as if the episode's job had been cancelled: its group would never come."""

    def plain():
        raise asyncio.CancelledError

    async def waits():
        raise asyncio.CancelledError

    async def ends_its_task():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def main():
        for function in (plain, waits, ends_its_task):
            with pytest.raises(CancelledItself, match="cancelled from within"):
                await call_bounded(function, deadline=5)
        for function in (plain, waits):
            with pytest.raises(CancelledItself, match="cancelled from within"):
                await call_bounded(function, deadline=5, inline=True)
        with pytest.raises(EnvironmentFault, match=r"step\(\) of Shop raised CancelledItself"):
            await guarded(waits, (), {}, "step() of Shop", deadline=5)

    asyncio.run(main())


def test_a_call_cancelled_before_it_began_leaves_no_warning() -> None:
    """As when a run ends, and cancels all, while an episode is just about to step."""

    async def step() -> None:
        raise AssertionError("not begun")

    async def go() -> None:
        call = asyncio.ensure_future(call_bounded(step, deadline=5))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(call, return_exceptions=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(go())
        gc.collect()
    assert [str(w.message) for w in caught] == []


def test_a_coroutine_that_comes_too_late_is_dropped_in_silence() -> None:
    async def late() -> None:
        raise AssertionError("not begun")

    def step() -> Any:
        time.sleep(0.3)
        return late()

    async def go() -> None:
        with pytest.raises(DeadlinePassed):
            await call_bounded(step, deadline=0.05)
        await asyncio.sleep(0.5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(go())
        gc.collect()
    assert [str(w.message) for w in caught] == []
