"""All speed benchmarks, one after the other, and one table: `make bench`.

    python bench/speed.py [--trl PYTHON] [--vllm PYTHON] [--parts decode grpo vs_trl tools growth]

Peers live in environments of their own (bench/make_trl_env.sh, bench/make_vllm_env.sh); one that is not
given, by option or as STEPLADDER_TRL and STEPLADDER_VLLM, is left out. Everything takes about 35 minutes
on two cores, and wants a machine that does nothing else. Each part keeps what it has measured: stop it,
and the same command goes on; a change of the library's code begins anew (--reuse all keeps what is there).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import HERE, Target, parser, peer, target_table

PARTS = {  # name -> (title, the peer it takes)
    "decode": ("Decoding", "vllm"),
    "grpo": ("GRPO step", "trl"),
    "vs_trl": ("Other training steps", "trl"),
    "tools": ("Slow tools", ""),
    "growth": ("How cost grows", ""),
}


def command(part: str, options: argparse.Namespace) -> list[str]:
    line = [sys.executable, str(HERE / f"{part}.py")]
    given = {"model": options.model, "repeats": options.repeats, "threads": options.threads}
    given |= {"out": options.out, "reuse": options.reuse}
    name = PARTS[part][1]
    if name:
        given[name] = getattr(options, name)
    for key, value in given.items():
        line += [f"--{key}", str(value)]
    return [*line, *more(options.more, part)]


def more(words: list[str], part: str) -> list[str]:
    """Of "decode:--sizes decode:1 grpo:--new grpo:8" what is for this part."""
    return [w.partition(":")[2] for w in words if w.partition(":")[0] == part]


def page(out: Path) -> str:
    """The table of every part that has finished in this folder."""
    lines = ["# Speed: what was measured, beside what it has to be", ""]
    for part, (title, _) in PARTS.items():
        path = out / f"{part}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        lines += [f"## {title}", ""]
        if "targets" not in found:
            lines += ["Not measured.", ""]
            continue
        lines += [f"{found['about']} [All numbers]({part}.md).", ""]
        lines += [*target_table([Target(**t) for t in found["targets"]]), ""]
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    failed = []
    for part in options.parts:
        began = time.monotonic()
        code = subprocess.run(command(part, options)).returncode
        minutes = (time.monotonic() - began) / 60
        said = "done" if code == 0 else f"FAILED ({code})"
        print(f"-- {part}: {said} in {minutes:.1f} minutes\n", flush=True)
        if code:
            failed.append(part)
    text = page(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speed.md").write_text(text, encoding="utf-8")
    print(text)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return len(failed)


def options_parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    peer(made, "trl")
    peer(made, "vllm")
    made.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    made.add_argument("--more", nargs="+", default=[], metavar="PART:WORD", help="options of one part")
    return made


if __name__ == "__main__":
    sys.exit(run(options_parser().parse_args()))
