"""A Jinja prelude that teaches any chat template about tools, by rewriting the messages before it runs.

The tools are added to the system message (to the first user message where there is no system role), calls
are appended to the assistant's text, and neighbouring tool results become one user message. Then the
model's own template follows, untouched. Without tools, calls or results it sees the very same messages.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources

_INTRO = "You can call tools:"
_TAGGED = {
    "intro": _INTRO,
    "howto": 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> '
    "and wait for the result.",
    "opening": "<tool_call>",
    "closing": "</tool_call>",
}
_FENCED = {
    "intro": _INTRO,
    "howto": 'To call one, write\n```tool_call\n{"name": NAME, "arguments": {...}}\n```\n'
    "and wait for the result.",
    "opening": "```tool_call\n",
    "closing": "\n```",
}
STYLES = {"plain": _TAGGED, "fenced": _FENCED}


def wrap(template: str, style: str = "plain", *, system: bool = True, parts: bool = False) -> str:
    """`template` behind a prelude that shows tools in `style`.

    `system=False`: the template has no system role. `parts=True`: it takes content only as parts.
    """
    values = {name: json.dumps(text) for name, text in STYLES[style].items()}
    values |= {"system": json.dumps(system), "parts": json.dumps(parts)}
    settings = ", ".join(f"{name}={value}" for name, value in values.items())
    # A block at the start of a line loses the blanks before it (lstrip_blocks); it no longer starts one.
    own = re.sub(r"\A[ \t]+(?=\{[%#])", "", template)
    return f"{mark(style)}\n{{%- set shown = namespace({settings}) -%}}\n{_prelude()}{own}"


@cache
def _prelude() -> str:
    text = (resources.files("stepladder.data.chat") / "templates" / "tools.jinja").read_text(encoding="utf-8")
    return text.rstrip("\n")  # what follows is the model's own template, to the letter


def mark(style: str) -> str:
    """The Jinja comment at the start of a template by which its style is known again."""
    return f"{{#- stepladder tools: {style} -#}}"


def style_of(template: str) -> str | None:
    """The style a template was wrapped in, or None."""
    match = re.match(r"\{#- stepladder tools: (\w+) -#\}", template)
    return match.group(1) if match else None
