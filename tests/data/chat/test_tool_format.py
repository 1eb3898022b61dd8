"""Detecting and wrapping: tools for a model whose template knows none, here and in other software."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, PICTURES, bpe_tokenizer
from transformers import AutoTokenizer

from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tool_format import FENCED, HERMES, PLAIN, detect_tool_format
from stepladder.errors import TemplateError
from stepladder.types import ImagePart, Message, TextPart, Tool, ToolCall

MARKS = ("<|im_start|>", "<|im_end|>")
ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})
# SmolLM2's habits: a default system message, nothing about tools.
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(template: str = DEFAULT_SYSTEM) -> Any:
    return bpe_tokenizer(template, MARKS, eos="<|im_end|>")


def shown(tokenizer: Any, messages: list[Message], tools: tuple[Tool, ...] = ()) -> str:
    rows = [message.to_dict() for message in messages]
    schemas = [tool.to_dict() for tool in tools] or None
    return str(tokenizer.apply_chat_template(rows, tools=schemas, tokenize=False, add_generation_prompt=True))


def test_a_wrapped_template_without_tools_is_the_original() -> None:
    plain, wrapped = chatml(), chatml()
    Renderer(wrapped)
    assert wrapped.chat_template != plain.chat_template
    for messages in (
        [Message("user", "Hi")],
        [
            Message("system", "Be brief."),
            Message("user", "Hi"),
            Message("assistant", "Ho"),
            Message("user", "?"),
        ],
    ):
        assert shown(wrapped, messages) == shown(plain, messages)


def test_text_given_as_parts_renders_as_the_same_text() -> None:
    """vLLM turns every string into a list of parts for a template that, like ours, can read such lists."""
    tokenizer = chatml()
    Renderer(tokenizer)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    parted = [row | {"content": [{"type": "text", "text": row["content"]}]} for row in rows]
    for tools in (None, [ADD.to_dict()]):
        for messages in (rows, rows[1:]):
            one, other = (
                tokenizer.apply_chat_template(chosen, tools=tools, tokenize=False, add_generation_prompt=True)
                for chosen in (messages, parted[-len(messages) :])
            )
            assert one == other
            assert "And 2 + 2?" in one


def test_leading_blanks_of_the_original_stay_what_they_were() -> None:
    for blanks in ("", "  ", "\n", "\n  "):
        plain, wrapped = chatml(blanks + DEFAULT_SYSTEM), chatml(blanks + DEFAULT_SYSTEM)
        Renderer(wrapped)
        assert shown(wrapped, [Message("user", "Hi")]) == shown(plain, [Message("user", "Hi")])


def test_the_plain_style_letter_by_letter() -> None:
    tokenizer = chatml()
    Renderer(tokenizer)
    call = ToolCall("add", {"a": 1}, id="c0")
    messages = [
        Message("system", "Be brief."),
        Message("user", "1?"),
        Message("assistant", "Hm.", (call, ToolCall("add", {"a": 2}, id="c1"))),
        Message("tool", "one", tool_call_id="c0"),
        Message("tool", "two", tool_call_id="c1"),
    ]
    assert shown(tokenizer, messages, (ADD,)) == (
        "<|im_start|>system\nBe brief.\n\nYou can call tools:\n"
        '{"name": "add", "description": "Add.", "parameters": '
        '{"type": "object", "properties": {"a": {"type": "integer"}}}}\n'
        'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> and wait '
        "for the result.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\nHm.\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_wrapped_template_is_saved_and_known_again(tmp_path: Path) -> None:
    tokenizer = chatml()
    renderer = Renderer(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template
    again = Renderer(loaded)
    assert loaded.chat_template == tokenizer.chat_template  # not wrapped twice
    assert again.tool_format.name == renderer.tool_format.name == "plain"
    messages = [Message("user", "1?")]
    assert again.start(messages, [ADD]).prompt_ids == renderer.start(messages, [ADD]).prompt_ids


def test_the_fenced_style() -> None:
    tokenizer = chatml()
    renderer = Renderer(tokenizer, FENCED.for_template(tokenizer.chat_template))
    call = ToolCall("add", {"a": 1}, id="c0")
    text = shown(tokenizer, [Message("user", "1?"), Message("assistant", "", (call,))], (ADD,))
    assert '```tool_call\n{"name": "add", "arguments": {"a": 1}}\n```<|im_end|>' in text
    assert renderer.tool_format.parse(FENCED.write(call)).calls[0].arguments == {"a": 1}
    assert detect_tool_format(tokenizer).name == "fenced"


def test_a_template_without_a_system_role_gets_the_tools_in_the_first_user_message() -> None:
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = chatml(strict + CHATML.removeprefix("{% for m in messages %}"))
    Renderer(tokenizer)
    for messages in ([Message("user", "1?")], [Message("system", "Be brief."), Message("user", "1?")]):
        text = shown(tokenizer, messages, (ADD,))
        assert "system" not in text
        assert text.endswith("wait for the result.\n\n1?<|im_end|>\n<|im_start|>assistant\n")
        assert ("Be brief.\n\nYou can call" in text) == (len(messages) == 2)


def test_images_in_tool_results_stay_parts() -> None:
    tokenizer = bpe_tokenizer(PICTURES, (*MARKS, "<image>"), eos="<|im_end|>")
    renderer = Renderer(tokenizer)
    result = Message("tool", (TextPart("seen: "), ImagePart("a.png")), tool_call_id="c0")
    call = Message("assistant", "", (ToolCall("add", {"a": 1}, id="c0"),))
    conversation = renderer.start([Message("user", "1?"), call, result], [ADD])
    assert "<tool_response>\nseen: <image>\n</tool_response>" in renderer.decode(conversation.prompt_ids)


def test_only_styles_with_a_prelude_can_be_wrapped() -> None:
    assert PLAIN.for_template(CHATML).chat_template
    with pytest.raises(ValueError, match="use one of plain, fenced"):
        HERMES.for_template(CHATML)


def test_tools_are_never_dropped_in_silence() -> None:
    """A format that the template does not speak is refused; PLAIN by hand wraps like the detected one."""
    tokenizer = chatml()
    with pytest.raises(TemplateError, match="shows no tools, but 1 were given"):
        Renderer(tokenizer, HERMES).start([Message("user", "1?")], [ADD])
    by_hand, detected = Renderer(chatml(), PLAIN), Renderer(chatml())
    prompts = [r.start([Message("user", "1?")], [ADD]).prompt_ids for r in (by_hand, detected)]
    assert prompts[0] == prompts[1]


def test_of_several_named_templates_the_default_is_wrapped() -> None:
    tokenizer = chatml()
    tokenizer.chat_template = {"default": DEFAULT_SYSTEM, "other": "x"}
    renderer = Renderer(tokenizer)
    assert "You can call tools" in renderer.decode(renderer.start([Message("user", "1?")], [ADD]).prompt_ids)
