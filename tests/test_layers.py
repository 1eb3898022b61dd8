"""The package's shape: imports point down, each layer imports only what it may, files stay short."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepladder

ROOT = Path(stepladder.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The level of each part (docs: the layers). Parts of one level do not import each other. Within a level the
# modules that others of it are built on come first, as in 3.0 before 3.1.
LEVELS = {
    "types": 0.0,
    "errors": 0.0,
    "algorithms": 0.0,
    "atomic": 0.0,
    "plugins": 0.1,
    "deadlines": 0.1,
    "boundary": 0.1,
    "threads": 0.1,
    "recipe": 0.2,
    "objectives": 1.0,
    "data": 1.0,
    "diagnostics": 1.0,
    "reports": 1.0,
    "policies": 2.0,
    "engines": 2.0,
    "environments": 2.0,
    "rewards": 2.0,
    "planning": 2.1,  # reads the sizes of models where policies find them
    "play": 3.0,
    "evaluation": 3.1,  # plays
    "run": 3.2,  # keeps what was played and evaluated
    "workbench": 4.1,
    "rungs": 4.1,
    "ladder": 5.0,
    "commands": 5.1,
    "cli": 5.2,
    "__main__": 5.3,
}
LATE = {"cli"}  # imports what a command needs when the command runs


def part_of(file: Path) -> str:
    relative = file.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    return "rungs" if part == "workbench" else part  # until each rung says itself what it checks


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, *, late: bool = True) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import that runs; those under TYPE_CHECKING are for readers only."""
    tree = parsed(file)
    package = ["stepladder", *file.relative_to(ROOT).parts[:-1]]
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not late and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            if module == "stepladder":
                yield from ((node.lineno, f"stepladder.{alias.name}") for alias in node.names)
        stack += list(ast.iter_child_nodes(node))


def test_every_part_has_a_level() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts <= set(LEVELS), f"give {parts - set(LEVELS)} a level"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    part = part_of(file)
    if part == "__init__":
        return
    wrong = []
    for line, module in imports(file):
        head, _, rest = module.partition(".")
        other = "rungs" if rest.startswith("workbench") else rest.partition(".")[0]
        if head != "stepladder" or not other or other == part or other == "__version__":
            continue
        if LEVELS[other] >= LEVELS[part]:
            wrong.append(f"line {line}: {part} ({LEVELS[part]}) imports {module} ({LEVELS[other]})")
    assert not wrong, "\n".join(wrong)


def uses(part: str, library: str, *, late: bool = True) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in FILES
        if part_of(file) == part
        for line, module in imports(file, late=late)
        if module.split(".")[0] == library
    ]


def test_objectives_import_torch_and_nothing_of_ours() -> None:
    foreign = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in FILES
        if part_of(file) == "objectives"
        for line, module in imports(file)
        if module.startswith("stepladder") and not module.startswith("stepladder.objectives")
    ]
    assert not foreign


@pytest.mark.parametrize("library", ["torch", "transformers"])
@pytest.mark.parametrize("part", ["environments", "rewards", "reports"])
def test_worlds_rewards_and_reports_know_no_tensors(part: str, library: str) -> None:
    assert not uses(part, library)


def test_environments_know_no_tokens() -> None:
    assert not uses("environments", "tokenizers")


def test_optional_packages_are_imported_late() -> None:
    """Extras may be missing; nothing of them is imported with a module."""
    trackers = ("wandb", "trackio", "tensorboard")
    extras = ("httpx", "gguf", *trackers, "peft", "vllm", "ray", "datasets", "pyarrow")
    assert not [use for part in LEVELS for extra in extras for use in uses(part, extra, late=False)]


def test_the_light_parts_load_no_torch() -> None:
    """Whatever they import in turn: asked of a fresh interpreter."""
    parts = [p for p, level in LEVELS.items() if level < 1] + ["environments", "rewards", "reports"]
    modules = [
        ".".join(["stepladder", *f.relative_to(ROOT).with_suffix("").parts])
        for f in FILES
        if part_of(f) in parts and f.name != "__init__.py"
    ]
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_file_is_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_median_file_is_short() -> None:
    lengths = sorted(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES)
    assert lengths[len(lengths) // 2] <= 160


def test_at_most_25_public_names_and_each_is_there() -> None:
    assert len(stepladder.__all__) <= 25
    for name in stepladder.__all__:
        assert getattr(stepladder, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = stepladder.trian
