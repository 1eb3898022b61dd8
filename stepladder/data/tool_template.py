"""A Jinja prelude that teaches any chat template about tools, by rewriting the messages before it runs.

The tools are added to the system message (to the first user message where there is no system role), calls
are appended to the assistant's text, and neighbouring tool results become one user message. Then the
model's own template follows, untouched. Without tools, calls or results it sees the very same messages.
"""

from __future__ import annotations

import re

_TAGGED = (
    "You can call tools:",
    'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> and wait for the result.',
    "<tool_call>",
    "</tool_call>",
)
_FENCED = (
    "You can call tools:",
    'To call one, write a block\\n```tool_call\\n{"name": NAME, "arguments": {...}}\\n```\\n'
    "and wait for the result.",
    "```tool_call\\n",
    "\\n```",
)
# style -> how tools are introduced, how a call is explained, what stands before and after a call
STYLES = {"plain": _TAGGED, "fenced": _FENCED}

_MARK = "{#- stepladder tools: STYLE -#}"
_PRELUDE = """
{%- macro sl_text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set sl = namespace(out=[], tools='', parts=[], text='') -%}
{%- if tools -%}
{%- set sl.tools = 'INTRO' -%}
{%- for tool in tools -%}
{%- set sl.tools = sl.tools ~ '\\n' ~ ((tool.function if tool.function is defined else tool) | tojson) -%}
{%- endfor -%}
{%- set sl.tools = sl.tools ~ '\\nHOWTO' -%}
{%- endif -%}
SYSTEM
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if message.content is string or message.content is not iterable -%}
{%- set sl.parts = sl.parts + [{'type': 'text', 'text': '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>'}] -%}
{%- else -%}
{%- set sl.parts = sl.parts + [{'type': 'text', 'text': '<tool_response>\\n'}] + message.content + [{'type': 'text', 'text': '\\n</tool_response>'}] -%}
{%- endif -%}
{%- if loop.last or loop.nextitem.role != 'tool' -%}
{%- set sl.out = sl.out + [{'role': 'user', 'content': RESULT}] -%}
{%- set sl.parts = [] -%}
{%- else -%}
{%- set sl.parts = sl.parts + [{'type': 'text', 'text': '\\n'}] -%}
{%- endif -%}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{%- set sl.text = sl_text(message.content) -%}
{%- for tool_call in message.tool_calls -%}
{%- set call = tool_call.function if tool_call.function is defined else tool_call -%}
{%- set sl.text = sl.text ~ ('\\n' if sl.text else '') ~ 'OPEN{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' ~ (call.arguments if call.arguments is string else (call.arguments | tojson)) ~ '}CLOSE' -%}
{%- endfor -%}
{%- if message.reasoning_content -%}
{%- set sl.out = sl.out + [{'role': 'assistant', 'reasoning_content': message.reasoning_content, 'content': ANSWER}] -%}
{%- else -%}
{%- set sl.out = sl.out + [{'role': 'assistant', 'content': ANSWER}] -%}
{%- endif -%}
{%- else -%}
{%- set sl.out = sl.out + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = sl.out -%}
{%- set tools = none -%}
{{- '' }}"""

_INTO_SYSTEM = """{%- if sl.tools and messages and messages[0].role == 'system' -%}
{%- set sl.text = sl_text(messages[0].content) ~ '\\n\\n' ~ sl.tools -%}
{%- set sl.out = [{'role': 'system', 'content': ANSWER}] -%}
{%- set messages = messages[1:] -%}
{%- elif sl.tools -%}
{%- set sl.text = sl.tools -%}
{%- set sl.out = [{'role': 'system', 'content': ANSWER}] -%}
{%- endif -%}"""

_INTO_USER = """{%- if messages and messages[0].role == 'system' -%}
{%- set sl.tools = sl_text(messages[0].content) ~ ('\\n\\n' if sl.tools else '') ~ sl.tools -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if sl.tools and messages and messages[0].role == 'user' -%}
{%- if messages[0].content is string -%}
{%- set sl.text = sl.tools ~ '\\n\\n' ~ messages[0].content -%}
{%- set sl.out = [{'role': 'user', 'content': ANSWER}] -%}
{%- else -%}
{%- set sl.out = [{'role': 'user', 'content': [{'type': 'text', 'text': sl.tools ~ '\\n\\n'}] + messages[0].content}] -%}
{%- endif -%}
{%- set messages = messages[1:] -%}
{%- elif sl.tools -%}
{%- set sl.text = sl.tools -%}
{%- set sl.out = [{'role': 'user', 'content': ANSWER}] -%}
{%- endif -%}"""


def wrap(template: str, style: str = "plain", *, system: bool = True, parts: bool = False) -> str:
    """`template` behind a prelude that shows tools in `style`.

    `system=False`: the template has no system role. `parts=True`: it takes content only as parts.
    """
    intro, howto, opening, closing = STYLES[style]
    if parts:
        result, answer = "sl.parts", "[{'type': 'text', 'text': sl.text}]"
    else:
        all_text = "(sl.parts | rejectattr('type', 'equalto', 'text') | list | length) == 0"
        result = f"(sl.parts | map(attribute='text') | join('')) if {all_text} else sl.parts"
        answer = "sl.text"
    prelude = _MARK + _PRELUDE.replace("SYSTEM", _INTO_SYSTEM if system else _INTO_USER)
    for name, value in {
        "STYLE": style,
        "INTRO": intro,
        "HOWTO": howto,
        "OPEN": opening,
        "CLOSE": closing,
        "RESULT": result,
        "ANSWER": answer,
    }.items():
        prelude = prelude.replace(name, value)
    # A block at the start of a line loses the blanks before it (lstrip_blocks); it no longer starts one.
    return prelude + re.sub(r"\A[ \t]+(?=\{[%#])", "", template)


def style_of(template: str) -> str | None:
    """The style a template was wrapped in, or None."""
    match = re.match(r"\{#- stepladder tools: (\w+) -#\}", template)
    return match.group(1) if match else None
