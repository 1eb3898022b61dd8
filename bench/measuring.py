"""What the speed benchmarks share: the machine in words, measurements that are kept, targets, medians.

A part keeps every number it has measured in bench/results/NAME.json, so that it can be stopped and started
again; a number measured with other settings, other code or on another machine is measured anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Target:
    """One number beside what it has to be. `least` may be None (only an aim); `below`: less is better.

    `value` is None where it was not measured, and `why` says why not.
    """

    name: str
    value: float | None
    least: float | None = None
    aim: float | None = None
    below: bool = False
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return self.why or "not measured"
        if self.aim is not None and self._reaches(self.aim):
            return "aim reached"
        if self.least is None:
            return "short of the aim" if self.aim is not None else ""
        return "reached" if self._reaches(self.least) else "NOT reached"

    def _reaches(self, bar: float) -> bool:
        assert self.value is not None
        return self.value <= bar if self.below else self.value >= bar


class Kept:
    """The numbers of one part, in a JSON file that is written after each."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, reuse: str = "same") -> None:
        self.path = path
        made = {"settings": _plain(settings), "machine": machine(), "code": code_hash()}
        old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        same = old.get("made") == made or (reuse == "all" and bool(old))
        if reuse == "none" or not same:
            old = {}
        self.made: dict[str, Any] = old.get("made", made)
        self.values: dict[str, Any] = old.get("values", {})
        self.about: str = old.get("about") or about()

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """What `measure` gave the first time."""
        if key not in self.values:
            self.values[key] = measure()
            self.save()
        return self.values[key]

    def save(self, targets: Sequence[Target] = ()) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {"made": self.made, "about": self.about, "values": self.values}
        if targets:
            found["targets"] = [asdict(t) for t in targets]
        self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def page(self, title: str, lines: Sequence[str], targets: Sequence[Target]) -> None:
        """Print the page and write it beside the numbers; with `targets` the part is finished."""
        self.save(targets)
        text = "\n".join([f"# {title}", "", self.about, "", *lines, "", *target_table(targets), ""])
        self.path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text, flush=True)


def target_table(targets: Sequence[Target]) -> list[str]:
    lines = ["| what | measured | at least | aim | |", "|---|---|---|---|---|"]
    for t in targets:
        sign = "at most " if t.below else ""
        bars = [f"{sign}{bar:g}" if bar is not None else "" for bar in (t.least, t.aim)]
        value = "" if t.value is None else f"{t.value:.2f}" if abs(t.value) >= 0.1 else f"{t.value:.2g}"
        lines.append(f"| {t.name} | {value} | {bars[0]} | {bars[1]} | {t.verdict} |")
    return lines if targets else []


# -- the command line ----------------------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all parts have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default=MODEL, help="a bundled name or a local folder")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    made.add_argument(
        "--reuse",
        choices=("same", "all", "none"),
        default="same",
        help="measurements already in --out: those of the same code, settings and machine; all; none",
    )
    return made


def peer(made: argparse.ArgumentParser, name: str) -> None:
    """`--trl PYTHON`, by default $STEPLADDER_TRL."""
    made.add_argument(
        f"--{name}",
        default=os.environ.get(f"STEPLADDER_{name.upper()}", ""),
        help=f"Python of an environment with {name} (bench/make_{name}_env.sh); without it, it is left out",
    )


def start(options: argparse.Namespace, part: str, *, leave_out: Sequence[str] = ()) -> Kept:
    """Apply the common options; the part's file."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "reuse", *leave_out)}
    return Kept(options.out / f"{part}.json", settings, reuse=options.reuse)


def model_folder(name: str) -> Path:
    from stepladder.policies.pretrained import resolve_model

    return resolve_model(name)


# -- the machine and the code --------------------------------------------------------------------------------


def machine() -> str:
    """The processor, without the machine's name."""
    lines = _cpuinfo()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line for line in lines if line.startswith("flags")), "")
    extra = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    import torch

    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return " ".join([f"{cpu or platform.machine()}, {threads}", *extra])


def about() -> str:
    """The machine, the libraries, the load, and the code that is measured."""
    import torch
    import transformers

    return (
        f"{machine()}; torch {torch.__version__}, transformers {transformers.__version__}; load average at "
        f"the start {os.getloadavg()[0]:.1f}; {commit()}."
    )


def commit() -> str:
    """The commit, and whether something was changed since."""
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except OSError:
        return "no commit"
    return f"commit {head.stdout.strip()}" if head.returncode == 0 else "no commit"


def code_hash() -> str:
    """Of every module of the library."""
    seen = hashlib.blake2b(digest_size=8)
    for path in sorted((HERE.parent / "stepladder").rglob("*.py")):
        seen.update(path.read_bytes())
    return seen.hexdigest()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without the paths of this machine: a model by its folder's name, a peer by whether it was given."""
    short = {"model": lambda v: Path(v).name, "trl": bool, "vllm": bool}
    return {k: short[k](v) if k in short else v for k, v in settings.items()}


# -- measuring -----------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_within(measure: Callable[[], float], repeats: int, seconds: float) -> float:
    """The median of up to `repeats` values, fewer where they take more than `seconds` together."""
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < repeats and (not found or time.perf_counter() - began < seconds):
        found.append(measure())
    return statistics.median(found)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of log y over log x by least squares: 1 is linear, 2 quadratic.

    >>> round(exponent([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)


def steepest(points: Sequence[tuple[float, float]]) -> float:
    """The largest exponent between two neighbours."""
    return max(exponent(pair) for pair in pairwise(points))


def resident() -> float:
    """Bytes that this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
