"""Writing TOML (the standard library only reads it): enough for a recipe, and checked by reading it back."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from stepladder.errors import ConfigError

_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def to_toml(table: Mapping[str, Any]) -> str:
    """A nested mapping as TOML text; `tomllib.loads` gives it back.

    TOML has no null: a None is written as a comment, so that a reader sees the setting exists.
    Raises ConfigError for values TOML cannot hold.

    >>> print(to_toml({"seed": 0, "model": {"name": "x", "lora": None}}), end="")
    seed = 0
    <BLANKLINE>
    [model]
    name = "x"
    # lora is not set
    """
    lines: list[str] = []
    _write_table(lines, table, ())
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(lines: list[str], table: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Plain keys first, then sub-tables: after a header, every plain key belongs to that header."""
    tables, arrays = {}, {}
    for key, value in table.items():
        if not isinstance(key, str):
            raise ConfigError(f"a TOML key must be text; got {key!r} in [{'.'.join(path)}].")
        if isinstance(value, Mapping):
            tables[key] = value
        elif _is_table_list(value):
            arrays[key] = value
        elif value is None:
            lines.append(f"# {_key(key)} is not set")
        else:
            lines.append(f"{_key(key)} = {_value(value, (*path, key))}")
    for key, value in tables.items():
        lines += ["", f"[{_header((*path, key))}]"]
        _write_table(lines, value, (*path, key))
    for key, items in arrays.items():
        for item in items:
            lines += ["", f"[[{_header((*path, key))}]]"]
            _write_table(lines, item, (*path, key))


def _is_table_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _header(path: tuple[str, ...]) -> str:
    return ".".join(_key(part) for part in path)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    """JSON's escapes are TOML's, except that TOML also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, PurePath):
        return _string(str(value))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, path) for item in value) + "]"
    if isinstance(value, Mapping):
        inside = (f"{_key(k)} = {_value(v, (*path, k))}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(inside) + " }"
    raise ConfigError(f"{'.'.join(path)} = {value!r} ({type(value).__name__}) cannot be written as TOML.")
