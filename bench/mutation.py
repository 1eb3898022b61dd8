"""Plants small errors in the objectives, one at a time, and shows that the tests catch each.

    python bench/mutation.py [--only WORDS] [--out bench/results/mutation.txt]

The tree is copied to a temporary folder; a mutant counts as caught when the tests fail there. The unchanged
copy must pass first. Exit status 1 if one survives."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
# Quick suites first; the matrix sees only what they let through.
ROUNDS = (
    [
        "tests/objectives/test_golden.py",
        "tests/objectives/test_policy_gradient.py",
        "tests/objectives/test_known_faults.py",
        "tests/objectives/test_credit.py",
        "tests/objectives/test_advantages.py",
        "tests/objectives/test_reduce.py",
        "tests/objectives/test_kl.py",
        "tests/objectives/test_corrections.py",
        "tests/objectives/test_preference_maths.py",
        "tests/objectives/test_reward_model_maths.py",
        "tests/objectives/test_logprobs_maths.py",
        "tests/objectives/test_estimators.py",
        "tests/objectives/test_hard_inputs.py",
        "tests/diagnostics/test_signals.py",
    ],
    ["tests/objectives"],
)


def failing_test(copy: Path, targets: list[str], plugins: list[str]) -> str | None:
    """The first test that fails in the copy, or None when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *plugins, *targets]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(copy), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    for _ in range(2):
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if found:
            return found.group(1).split("/")[-1]
    # No test failed and yet it did not pass, twice: that proves nothing about the mutant.
    raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")


def plant(copy: Path, mutant: Mutant) -> None:
    source = ROOT / "stepladder" / "objectives" / mutant.file
    text = source.read_text()
    if text.count(mutant.right) != 1:
        raise SystemExit(
            f"{mutant.what}: {mutant.right!r} stands {text.count(mutant.right)} times in {mutant.file}"
        )
    (copy / "stepladder" / "objectives" / mutant.file).write_text(text.replace(mutant.right, mutant.wrong))


def restore(copy: Path, mutant: Mutant) -> None:
    name = Path("stepladder", "objectives", mutant.file)
    shutil.copyfile(ROOT / name, copy / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose description holds these words")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--plugin", action="append", default=[], help="passed to pytest as -p")
    options = parser.parse_args()
    plugins = [argument for name in options.plugin for argument in ("-p", name)]
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.what]
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("stepladder", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "pyproject.toml", copy / "pyproject.toml")
        broken = failing_test(copy, ROUNDS[0], plugins)
        if broken:
            raise SystemExit(f"the unchanged tree fails: {broken}")
        survivors = 0
        for number, mutant in enumerate(chosen, 1):
            started = time.monotonic()
            plant(copy, mutant)
            killer = next(filter(None, (failing_test(copy, tests, plugins) for tests in ROUNDS)), None)
            restore(copy, mutant)
            survivors += killer is None
            verdict = f"caught by {killer}" if killer else "SURVIVED"
            lines.append(f"{number:3d}  {mutant.file:26s} {mutant.what:45s} {verdict}")
            print(f"{lines[-1]}  [{time.monotonic() - started:.0f} s]", flush=True)
    lines.append(f"{len(chosen)} mutants, {len(chosen) - survivors} caught, {survivors} survived")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
