"""Teams of OpenMP threads end with a call, and come back with the next operation."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from stepladder.threads import release_team


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process by /proc")
def test_a_team_is_given_back_and_made_again() -> None:
    seen: list[int] = []
    x = torch.arange(3_000_000.0)

    def compute() -> None:
        torch.set_num_threads(3)  # of this thread alone
        seen.append(threads())
        for _ in range(2):
            assert float((x * 2)[-1]) == 5999998.0
            seen.append(threads())
            release_team()
            seen.append(threads())
        release_team()  # there is none

    before = torch.get_num_threads()
    worker = threading.Thread(target=compute)
    worker.start()
    worker.join()
    torch.set_num_threads(before)
    start = seen[0]
    assert seen == [start, start + 2, start, start + 2, start]
