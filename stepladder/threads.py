"""The OpenMP threads that belong to a thread of Python which has computed.

libgomp, which torch's wheels for Linux bring, keeps such a team for each of them. Once all teams together
have more threads than there are cores, it lets a thread sleep at every barrier instead of spinning. So a
thread of Python that computed before, and only waits now, slows down the one that computes: on two cores a
decode step of 64 rows took 110 ms instead of 75. Whoever is going to wait gives its team back.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_SOFT = 1  # omp_pause_soft: what was set for the threads stays


def release_team() -> None:
    """End the OpenMP threads of the calling thread; its next operation makes them again, in some 0.1 ms.

    By `omp_pause_resource_all` (OpenMP API 5.0, section 3.2.44), which in libgomp speaks of the calling
    thread's team alone. Does nothing where it is absent. Not to be called from within an operation.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    if sys.platform != "linux":  # other systems' libraries pause every thread of the process
        return None
    found = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
    return found
