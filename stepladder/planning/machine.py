"""What this machine has free and how fast it multiplies and copies: read, and measured in under a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROBE_SECONDS = 0.2  # each of two probes


@dataclass(frozen=True, slots=True)
class Machine:
    """`free` and `total` bytes where the model will be, who says so, and measured rates.

    `flops`: floating-point operations a second of a large matrix product in the compute type. `bandwidth`:
    bytes a second of a copy, read and written counted.
    """

    device: str
    free: float
    total: float
    source: str
    flops: float
    bandwidth: float


def free_memory(device: str = "cpu", *, root: Path = Path("/")) -> tuple[float, float, str]:
    """(free bytes, all bytes, who says so). On a CPU a container's limit counts where it is the lower one."""
    if device.startswith("cuda"):
        import torch

        there, most = torch.cuda.mem_get_info(device)
        return float(there), float(most), "the GPU"
    free, total, source = _of_the_machine(root)
    for limit, used in _of_containers(root):
        if limit - used < free:
            free, total, source = max(0.0, limit - used), min(limit, total), "the container's limit"
    return free, total, source


def _of_the_machine(root: Path) -> tuple[float, float, str]:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        table = {line.split(":")[0]: float(line.split()[1]) * 1024 for line in lines if ":" in line}
        return table["MemAvailable"], table["MemTotal"], "the machine"
    except (OSError, KeyError):  # no Linux
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return total, total, "the machine, all of it (what is free is unknown here)"


def _of_containers(root: Path) -> list[tuple[float, float]]:
    """(limit, in use and not to be given back) of this process's control group and those above it."""
    found = []
    try:
        line = next(
            line for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
        )
        place = root / "sys/fs/cgroup" / line[3:].strip().lstrip("/")
        top = root / "sys/fs/cgroup"
        for folder in (place, *place.parents):
            if folder != top and top not in folder.parents:
                break
            found += _limits(folder, "memory.max", "memory.current", "inactive_file")
    except (OSError, StopIteration):
        pass
    old = root / "sys/fs/cgroup/memory"
    found += _limits(old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found


def _limits(folder: Path, limit: str, used: str, file_cache: str) -> list[tuple[float, float]]:
    try:
        most = float((folder / limit).read_text())
        busy = float((folder / used).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = next((float(value) for key, value in pairs if key == file_cache), 0.0)
    except (OSError, ValueError):  # no such group, or "max": no limit
        return []
    return [(most, busy - cached)]


def measure(
    device: str, dtype: str, threads: int = 0, *, seconds: float = PROBE_SECONDS
) -> tuple[float, float]:
    """(FLOP/s of a matrix product in `dtype`, bytes/s of a copy), each the best of `seconds`."""
    import torch

    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        gpu = not device.startswith("cpu")
        small = seconds < PROBE_SECONDS  # inside a run, whose memory may be nearly full
        side = 768 if not gpu else 2048 if small else 8192
        kind = getattr(torch, dtype)
        left = torch.ones(side, side, dtype=kind, device=device)
        right = torch.ones(side, side, dtype=kind, device=device)

        def wait() -> None:
            if gpu:
                (torch.cuda if device.startswith("cuda") else torch.mps).synchronize()

        product = _best(lambda: torch.mm(left, right), wait, seconds)
        source = torch.ones(1 << (27 if gpu and not small else 23), device=device)
        target = torch.empty_like(source)
        copy = _best(lambda: target.copy_(source), wait, seconds)
        return 2 * side**3 / product, 2 * 4 * source.numel() / copy
    finally:
        torch.set_num_threads(before)


def _best(work: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    work()
    wait()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return min(times)


class PeakMeter:
    """The most memory that this process held since `reset`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def reset(self) -> None:
        """Begin anew; where the system cannot (no Linux), the peak is that of the whole process."""
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return

    def read(self) -> float:
        """Bytes."""
        if self.device.startswith("cuda"):
            import torch

            return float(torch.cuda.max_memory_allocated(self.device))
        try:
            for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    return float(line.split()[1]) * 1024
        except OSError:
            pass
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
