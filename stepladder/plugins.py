"""Objects by import path: "package.module:Name" or "path/to/file.py:Name".

Loading runs that module's code; it happens only for a path that the user wrote.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stepladder.errors import ConfigError, nearest


def load_object(path: str, *, what: str = "object") -> Any:
    """The object that `path` names. Raises ConfigError where the module or the name is not there.

    An ImportError raised *inside* the module (a package it needs is missing) is passed on as it is.
    """
    module_path, colon, name = path.rpartition(":")
    if not colon or not module_path or not name:
        raise ConfigError(
            f"{what} {path!r} is no import path; write 'package.module:Name' or 'path/to/file.py:Name'"
        )
    module = _load_file(module_path, what) if module_path.endswith(".py") else _load_module(module_path, what)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            public = [known for known in vars(target) if not known.startswith("_")]
            hint = nearest(part, public)
            raise ConfigError(f"{module_path} has no {part!r}.{hint or f' It has: {_listed(public)}.'}")
        target = getattr(target, part)
    return target


def import_path(target: type) -> str:
    """The path under which `load_object` finds a class again; of a script run as __main__, its file.

    Raises ConfigError for what is no class, and for a class inside a function or a notebook cell, which
    nothing can import.
    """
    if not isinstance(target, type):
        raise ConfigError(
            f"environment={target!r} is no class; give the class itself, such as environment=Shop, or write "
            'its path into the recipe: {"environment": {"name": "my_file.py:Shop"}}'
        )
    module = sys.modules.get(target.__module__)
    file = getattr(module, "__file__", None)
    if "<locals>" in target.__qualname__ or (target.__module__ == "__main__" and file is None):
        raise ConfigError(
            f"{target.__qualname__} cannot be imported by a resumed run; move the class to the top level of "
            "a .py file"
        )
    if target.__module__ == "__main__" or target.__module__.startswith("stepladder_file_"):
        return f"{file}:{target.__qualname__}"
    return f"{target.__module__}:{target.__qualname__}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing public"


def _load_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only a missing part of the path itself is the user's typing error.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{what} module {name!r} was not found (no {error.name!r} on the import path); for a file "
                f"write 'path/to/file.py:Name'"
            ) from error
        raise


def _load_file(file: str, what: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"{what} file {file!r} does not exist.{nearest(path.name, siblings)}")
    script = sys.modules.get("__main__")
    if script is not None and path == Path(getattr(script, "__file__", None) or "-").resolve():
        return script  # it is running: a second time it would do again whatever it does
    # One module per file, under a name that cannot collide with an installed package.
    name = f"stepladder_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what} file {file!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported; last, so that nothing is hidden
    sys.modules[name] = module  # before running it: dataclasses and type hints look modules up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
