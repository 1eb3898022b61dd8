"""The summary and the parameter descriptions of a docstring: Google, NumPy or reST style."""

from __future__ import annotations

import re

_SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|references)\s*:?\s*$",
    re.IGNORECASE,
)
_PARAMETER_SECTIONS = ("args", "arguments", "parameters", "params")
_GOOGLE = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s+(.*)$")
_NUMPY = re.compile(r"^(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_REST = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")
_REST_ANY = re.compile(r"^:\w+[^:]*:")


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What comes before the first section, and {parameter: description}.

    >>> parse_docstring("Find it.\\n\\nArgs:\\n    query: what to find\\n        and where")
    ('Find it.', {'query': 'what to find and where'})
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _is_section(lines, i) or _REST_ANY.match(line)]
    summary = "\n".join(lines[: starts[0]] if starts else lines).strip()
    # Prose is one paragraph to a model: line breaks inside a paragraph were the editor's.
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", summary)]
    described: dict[str, str] = {}
    for position, start in enumerate(starts):
        end = starts[position + 1] if position + 1 < len(starts) else len(lines)
        described.update(_section(lines[start:end]))
    return "\n\n".join(paragraphs), described


def _is_section(lines: list[str], index: int) -> bool:
    line = lines[index]
    if not _SECTION.match(line):
        return False
    underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[index + 1]) is not None
    return line.rstrip().endswith(":") or underlined


def _section(lines: list[str]) -> dict[str, str]:
    rest = _REST.match(lines[0])
    if rest:
        more = [line.strip() for line in lines[1:] if line.strip()]
        return {rest[1]: " ".join([rest[2].strip(), *more]).strip()}
    if lines[0].strip().rstrip(":").strip().lower() not in _PARAMETER_SECTIONS:
        return {}
    if len(lines) > 1 and lines[1].startswith("---"):
        return _numpy(lines[2:])
    return _google(lines[1:])


def _google(lines: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    name, indent = "", None
    for line in lines:
        match = _GOOGLE.match(line)
        if match and (indent is None or len(match[1]) <= indent):
            indent, name = len(match[1]), match[2]
            out[name] = match[3].strip()
        elif name and line.strip():
            if not line.startswith(" "):
                break  # back at the margin: prose after the section
            out[name] = f"{out[name]} {line.strip()}"
    return out


def _numpy(lines: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        match = _NUMPY.match(line)
        if match and not line.startswith(" "):
            names = [name.strip() for name in match[1].split(",")]
        elif names and line.strip():
            for name in names:
                out[name] = f"{out.get(name, '')} {line.strip()}".strip()
    return out
