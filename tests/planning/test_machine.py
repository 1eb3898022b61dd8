"""Free memory as the machine or a container's limit says it; rates that are rates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepladder.planning.machine import PeakMeter, free_memory, measure

GB = 10**9


def machine(root: Path, *, available: int = 8 * GB, group: str | None = "0::/box/job\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {16 * GB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
    )
    if group is not None:
        (root / "proc/self/cgroup").write_text(group)
    return root


def limit(root: Path, folder: str, most: str, used: int, cached: int) -> None:
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{most}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_without_a_container(tmp_path: Path) -> None:
    free, total, who = free_memory(root=machine(tmp_path, group=None))
    assert (free, total, who) == (
        pytest.approx(8 * GB, abs=1024),
        pytest.approx(16 * GB, abs=1024),
        "the machine",
    )


def test_the_lowest_limit_of_all_groups_above(tmp_path: Path) -> None:
    """The job itself may take what it likes; the box around it 4 GB, of which 1.5 are used, .5 of that files
    that are given back when asked: 4 - (1.5 - .5) = 3 free."""
    root = machine(tmp_path)
    limit(root, "box/job", "max", 10, 0)
    limit(root, "box", str(4 * GB), 3 * GB // 2, GB // 2)
    assert free_memory(root=root) == (3 * GB, 4 * GB, "the container's limit")


def test_a_limit_above_what_is_free_says_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, available=2 * GB)
    limit(root, "box", str(4 * GB), 0, 0)
    assert free_memory(root=root)[2] == "the machine"


def test_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a slide rule and the largest CPU there is; threads are put back."""
    before = torch.get_num_threads()
    flops, bandwidth = measure("cpu", "float32", 1, seconds=0.01)
    assert 1e8 < flops < 1e14
    assert 1e8 < bandwidth < 1e13
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux")
def test_a_peak_that_is_gone_is_still_seen() -> None:
    meter = PeakMeter("cpu")
    meter.reset()
    before = meter.read()
    block = torch.ones(25_000_000)  # 100 MB, touched
    del block
    assert meter.read() - before > 60e6
