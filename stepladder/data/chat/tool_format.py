"""How a model is shown tools and how its calls are read back: render, parse and stops together.

A model whose own template knows tools in a syntax read here keeps it. For every other model the template
is wrapped (`tool_template.wrap`): the tools are listed in the system message, calls are written as
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and results come back in a user message as
`<tool_response>...</tool_response>`. The wrapped template is saved with the tokenizer, so that the trained
agent works the same in other software.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stepladder.data.chat import tool_template
from stepladder.data.chat.control import Tokenizer
from stepladder.data.chat.dialect import probe
from stepladder.data.chat.parsers import (
    ParsedText,
    parse_fenced,
    parse_function_xml,
    parse_hermes,
    parse_llama_json,
    parse_text,
)
from stepladder.types import ToolCall


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Render, parse and stops of one way to call tools.

    `chat_template` is the Jinja template to set on the tokenizer; None when its own handles tools.
    `stops` are extra end-of-turn tokens, used where the tokenizer has them.

    >>> PLAIN.parse('<tool_call>{"name": "now"}</tool_call>').calls[0].name
    'now'
    """

    name: str
    parser: Callable[[str], ParsedText]
    write: Callable[[ToolCall], str]
    stops: tuple[str, ...] = ()
    chat_template: str | None = None

    def parse(self, text: str) -> ParsedText:
        """Text, calls and reasoning of one assistant turn. Never raises."""
        return self.parser(text)

    def for_template(self, template: str, *, system: bool = True, parts: bool = False) -> ToolFormat:
        """This format with `template` wrapped so that it shows tools (formats that can be wrapped only)."""
        if self.name not in tool_template.STYLES:
            raise ValueError(
                f"the tool format {self.name!r} belongs to a model's own template and cannot be wrapped "
                f"around another; use one of {', '.join(tool_template.STYLES)}"
            )
        return replace(
            self, chat_template=tool_template.wrap(template, self.name, system=system, parts=parts)
        )


def _json_call(call: ToolCall, key: str) -> str:
    values: dict[str, Any] = {"name": call.name, key: dict(call.arguments)}
    return json.dumps(values, ensure_ascii=False)


def _write_function_xml(call: ToolCall) -> str:
    values = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n</parameter>\n"
        for k, v in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"


PLAIN = ToolFormat(
    "plain", parse_hermes, lambda call: f"<tool_call>{_json_call(call, 'arguments')}</tool_call>"
)
HERMES = ToolFormat(
    "hermes", parse_hermes, lambda call: f"<tool_call>\n{_json_call(call, 'arguments')}\n</tool_call>"
)
FUNCTION_XML = ToolFormat("function_xml", parse_function_xml, _write_function_xml)
LLAMA_JSON = ToolFormat(
    "llama_json", parse_llama_json, lambda call: _json_call(call, "parameters"), ("<|eom_id|>", "<|eot_id|>")
)
FENCED = ToolFormat(
    "fenced", parse_fenced, lambda call: f"```tool_call\n{_json_call(call, 'arguments')}\n```"
)
NO_TOOLS = ToolFormat("none", parse_text, lambda call: "")


def detect_tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """The format a tokenizer's chat template speaks; `PLAIN`, wrapped around it, where it speaks none known.

    A template that was wrapped before (a checkpoint of ours) is recognised and not wrapped again. Raises
    `TemplateError` when there is no usable template.
    """
    dialect = probe(tokenizer, {})
    template = template_of(tokenizer, tools=dialect.tools)
    wrapped = tool_template.style_of(template)
    if wrapped is not None:
        return {"plain": PLAIN, "fenced": FENCED, "none": NO_TOOLS}[wrapped]
    if dialect.tools:
        if "<function=" in template and "<tool_call>" in template:
            return FUNCTION_XML
        if "<tool_call>" in template and '"arguments' in template.replace('\\"', '"'):
            return HERMES
        if "python_tag" in template or '"parameters": dictionary' in template:
            return LLAMA_JSON
    return fitted(PLAIN, tokenizer)


def fitted(tool_format: ToolFormat, tokenizer: Tokenizer) -> ToolFormat:
    """`tool_format` with the tokenizer's template wrapped, where the style needs it and is not there."""
    if tool_format.name not in tool_template.STYLES or tool_format.chat_template is not None:
        return tool_format
    template = template_of(tokenizer, tools=False)
    if tool_template.style_of(template) == tool_format.name:
        return tool_format
    dialect = probe(tokenizer, {})
    return tool_format.for_template(template, system=dialect.system, parts=dialect.parts)


def template_of(tokenizer: Tokenizer, *, tools: bool) -> str:
    """The text of a chat template; some tokenizers have several by name, one of them for tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["tool_use"] if tools and "tool_use" in template else template["default"]
    return str(template)
