"""The layer keeps its promises to readers: pure functions on torch tensors, explained, of a readable size."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import stepladder.objectives

MODULES = sorted(Path(stepladder.objectives.__file__).parent.glob("*.py"))
PUBLIC = [path.stem for path in MODULES if not path.stem.startswith("_")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_it_imports_torch_and_nothing_of_ours_outside_the_layer(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "jaxtyping"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            inside = node.level == 1
            assert inside or (node.level == 0 and (node.module or "").split(".")[0] in allowed)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_says_what_it_computes(name: str) -> None:
    module = importlib.import_module(f"stepladder.objectives.{name}")
    functions = [
        function
        for function_name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not function_name.startswith("_")
    ]
    assert functions
    for function in functions:
        assert len(inspect.getdoc(function) or "") > 40, function
        assert "return" in function.__annotations__, function


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
