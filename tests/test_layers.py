"""The package's shape: imports point down, each layer imports only what it may, files stay short."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from house_rules import (
    Tree,
    circles,
    classes_of_one_name,
    crowded_folders,
    parsed,
    quoted_rungs,
    rungs_that_meet,
    without_importer,
)

import stepladder
from stepladder.algorithms import Algorithm
from stepladder.recipe.config import rung_sections

ROOT = Path(stepladder.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The level of each part; a subfolder or a module may have one of its own. A part imports lower levels only.
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
    "data/encoder": 1.0,
    "data/prefix": 1.0,
    "data/chat": 1.1,
    "data/files": 1.1,
    "data": 1.2,
    "diagnostics": 1.0,
    "reports": 1.0,
    "policies/fast": 2.0,
    "policies": 2.1,
    "engines": 2.0,
    "engines/local": 2.1,
    "engines/vllm": 2.1,
    "environments": 2.0,
    "environments/worlds": 2.1,
    "rewards": 2.0,
    "planning": 2.2,  # reads the sizes of models where policies find them, and numbers of the local engine
    "play": 3.0,
    "evaluation": 3.1,  # plays
    "run": 3.2,  # keeps what was played and evaluated
    "workbench": 4.0,
    "rungs": 4.1,  # what rungs share
    "rungs/rl/watch": 4.2,
    "rungs/sft": 4.3,
    "rungs/rejection_sampling": 4.3,
    "rungs/preference": 4.3,
    "rungs/reward_model": 4.3,
    "rungs/distillation": 4.3,
    "rungs/rl": 4.3,
    "rungs/registry": 4.4,
    "ladder": 5.0,
    "commands": 5.1,
    "cli": 5.2,
    "__main__": 5.3,
}
LATE = {"cli"}  # imports what a command needs when the command runs
TREE = Tree(ROOT)
RUNGS = list(rung_sections())


def part_of(file: Path) -> str:
    """Return the longest entry of LEVELS that holds the file; the name of the folder where there is none."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVELS), parts[0])


def imports(file: Path, *, late: bool = True) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of each import, those for type checkers included."""
    package = ["stepladder", *file.relative_to(ROOT).parts[:-1]]
    stack: list[ast.AST] = [parsed(file)]
    while stack:
        node = stack.pop()
        if not late and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not late and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
        stack += list(ast.iter_child_nodes(node))


def climbing(tree: Tree) -> list[str]:
    """Imports that do not point down."""
    wrong = []
    for file in tree.files:
        part = part_of(file)
        for other in tree.imports[file] if part != "__init__" else ():
            if part_of(other) != part and LEVELS[part_of(other)] >= LEVELS[part]:
                wrong.append(f"{tree.name(file)} ({LEVELS[part]}) imports {tree.name(other)}")
    return wrong


def test_every_part_has_a_level() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts <= set(LEVELS), f"give {parts - set(LEVELS)} a level"


def test_imports_point_down() -> None:
    assert not climbing(TREE)


def test_no_module_imports_itself_in_turn() -> None:
    assert not circles(TREE)


def test_no_rung_imports_another() -> None:
    assert not rungs_that_meet(TREE)


def test_no_folder_is_crowded() -> None:
    assert not crowded_folders(TREE)


# Started by name, written down by users in their recipes, or used by those who test a loop of their own.
ENTRIES = ("__main__.py", "rewards/qa.py", "engines/scripted.py")
FORMULAS = ("objectives/mirror.py", "objectives/overoptimisation.py")  # for those who call the objectives


def test_every_module_is_imported() -> None:
    assert not without_importer(TREE, (*ENTRIES, *FORMULAS))


def test_a_class_name_means_one_thing() -> None:
    assert not classes_of_one_name(TREE)


def test_a_rung_is_named_in_its_folder_its_section_and_the_registry() -> None:
    """Records of the kind "preference" are older than the rung of that name, and know nothing of it."""
    lower = ("data/", "environments/")
    assert not [line for line in quoted_rungs(TREE, RUNGS) if not line.startswith(lower)]


@pytest.mark.parametrize(
    ("start", "most"),
    [
        ("rungs/sft/rung.py", 10_000),
        ("rungs/rl/loop.py", 15_000),
        ("rungs/reward_model/rung.py", 9_000),
        ("environments/worlds/calculator.py", 4_000),
        ("environments/worlds/reviews.py", 4_000),
    ],
)
def test_what_a_reader_opens_is_bounded(start: str, most: int) -> None:
    """The module with all that it imports, in lines."""
    assert TREE.lines(TREE.closure([ROOT / start])) <= most


def test_gradients_are_accumulated_in_one_place() -> None:
    backward = [
        f"{TREE.name(file)}:{node.lineno}"
        for file in FILES
        if part_of(file).startswith("rungs")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and node.attr == "backward"
    ]
    assert [line.partition(":")[0] for line in backward] == ["rungs/accumulate.py"]


def test_episodes_are_played_at_two_places_at_most() -> None:
    calls = [
        f"{TREE.name(file)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rollout"
    ]
    assert len(calls) <= 2, calls


def test_every_column_of_an_algorithm_is_read() -> None:
    read = {
        node.attr
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    said = {"paper", "note"}  # for those who read the table
    assert {field.name for field in dataclasses.fields(Algorithm)} <= read | said


def uses(part: str, library: str, *, late: bool = True) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in FILES
        if part_of(file).partition("/")[0] == part
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
        if part_of(f).partition("/")[0] in parts and f.name != "__init__.py"
    ]
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_file_is_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., Tree]:
    """A small package with what a test writes into it."""

    def make(**files: str) -> Tree:
        for name, text in {"__init__": "", **files}.items():
            path = tmp_path / "stepladder" / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Tree(tmp_path / "stepladder")

    return make


def test_the_rules_find_what_is_planted(planted: Callable[..., Tree]) -> None:
    tree = planted(
        a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stepladder.b\nclass B: ...\n",
        b="from stepladder import a\nclass B: ...\n",
        lonely="",
        report="names = ['sft']\n",
        rungs__in__sft__in__rung="from stepladder.rungs.rl.loop import x\n",
        rungs__in__rl__in__loop="x = 'rl'\n",
    )
    assert circles(tree) == ["a.py", "b.py"]
    assert classes_of_one_name(tree) == ["B: a.py, b.py"]
    assert "lonely.py" in without_importer(tree, ["report.py", "rungs/sft/rung.py"])
    assert rungs_that_meet(tree) == ["rungs/sft/rung.py imports rungs/rl/loop.py"]
    assert quoted_rungs(tree, ["sft", "rl"]) == ["report.py:1 quotes 'sft'"]
    assert crowded_folders(tree, most=3) == ["stepladder: 4 files"]
    assert tree.lines(tree.closure([tree.root / "rungs/sft/rung.py"])) == 2


def test_an_import_that_points_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, "ladder", 0.0)
    assert any(line.startswith("ladder.py (0.0) imports") for line in climbing(TREE))


def test_the_median_file_is_short() -> None:
    lengths = sorted(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES)
    assert lengths[len(lengths) // 2] <= 130


def test_at_most_25_public_names_and_each_is_there() -> None:
    assert len(stepladder.__all__) <= 25
    for name in stepladder.__all__:
        assert getattr(stepladder, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = stepladder.trian
