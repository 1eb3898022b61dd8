"""What the C library's allocator keeps of freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Return freed pages to the system; nothing where the allocator cannot (it is glibc's malloc_trim).

    The tensors of one update have other sizes than those of the next, so the gaps they leave do not fit, and
    without this the process grows by a few hundred megabytes that nobody uses.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
