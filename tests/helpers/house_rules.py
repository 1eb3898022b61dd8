"""What the rules of the house ask of a tree of Python files: each rule returns what breaks it."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


class Tree:
    """The modules of a package under `root`; imports are read from the text, type-only ones included."""

    def __init__(self, root: Path, package: str = "stepladder") -> None:
        self.root, self.package = root, package
        self.files = sorted(root.rglob("*.py"))

    def module(self, file: Path) -> str:
        parts = file.relative_to(self.root).with_suffix("").parts
        return ".".join([self.package, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def find(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module.startswith(self.package) and file in self._known:
                return file
        return None

    @functools.cached_property
    def _known(self) -> frozenset[Path]:
        return frozenset(self.files)

    @functools.cached_property
    def imports(self) -> dict[Path, frozenset[Path]]:
        """Every module of the package that a file imports, wherever in the file the import stands."""
        return {
            file: frozenset(self._imports(file)) - {file, self.root / "__init__.py"} for file in self.files
        }

    def _imports(self, file: Path) -> Iterator[Path]:
        for node in ast.walk(parsed(file)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = self.module(file).split(".")
                above = above[: len(above) - node.level + (file.name == "__init__.py")] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    names.append(inner if self.find(inner) else module)
            yield from (found for name in names if (found := self.find(name)) is not None)

    def closure(self, start: Iterable[Path]) -> set[Path]:
        """Return what a reader of `start` opens: the files and all that they import, in turn."""
        seen, todo = set(start), list(start)
        while todo:
            new = self.imports[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    def lines(self, files: Iterable[Path]) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def circles(tree: Tree) -> list[str]:
    """Modules that import each other, directly or in turn."""
    return sorted(
        tree.name(file)
        for file in tree.files
        if any(file in tree.closure([other]) for other in tree.imports[file])
    )


def rungs_that_meet(tree: Tree) -> list[str]:
    """Imports of one rung's folder by another's."""
    found = []
    for file in tree.files:
        own = _rung(tree, file)
        for other in tree.imports[file] if own else ():
            if _rung(tree, other) not in (None, own):
                found.append(f"{tree.name(file)} imports {tree.name(other)}")
    return found


def _rung(tree: Tree, file: Path) -> str | None:
    parts = file.relative_to(tree.root).parts
    return parts[1] if parts[0] == "rungs" and len(parts) > 2 else None


def crowded_folders(tree: Tree, most: int = 20) -> list[str]:
    """Folders with more than `most` modules."""
    count = Counter(file.parent for file in tree.files if file.name != "__init__.py")
    return [f"{folder.name}: {n} files" for folder, n in count.items() if n > most]


def without_importer(tree: Tree, entries: Iterable[str]) -> list[str]:
    """Modules that nothing in the package imports or names by its path, but for the `entries`."""
    imported = set().union(*tree.imports.values())
    named = {
        module
        for file in tree.files
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for module in re.findall(rf"{tree.package}[\w.]*", node.value)
    }
    return [
        tree.name(file)
        for file in tree.files
        if file not in imported and file.name != "__init__.py"
        if tree.module(file) not in named and tree.name(file) not in entries
    ]


def classes_of_one_name(tree: Tree) -> list[str]:
    """Class names that mean several things."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in tree.files:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(tree.name(file))
    return [f"{name}: {', '.join(files)}" for name, files in homes.items() if len(files) > 1]


def quoted_rungs(tree: Tree, rungs: Iterable[str]) -> list[str]:
    """Where a rung's name is written as a string outside its folder, the registry and the recipe."""
    found = []
    for file in tree.files:
        name = tree.name(file)
        if name.startswith("recipe/") or name == "rungs/registry.py":
            continue
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Constant) and node.value in rungs and _rung(tree, file) is None:
                found.append(f"{name}:{node.lineno} quotes {node.value!r}")
    return found
