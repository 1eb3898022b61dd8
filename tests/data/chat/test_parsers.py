"""Reading tool calls: formats, and everything that is not quite a call (faults 92 and its neighbours)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.chat.parsers import (
    ParsedText,
    Parser,
    parse_fenced,
    parse_function_xml,
    parse_hermes,
    parse_llama_json,
    parse_text,
    read_json_call,
)
from stepladder.data.chat.tool_format import FENCED, FUNCTION_XML, HERMES, LLAMA_JSON, PLAIN, ToolFormat
from stepladder.types import ToolCall

PARSERS = [parse_hermes, parse_llama_json, parse_fenced, parse_function_xml, parse_text]
FORMATS = [PLAIN, HERMES, LLAMA_JSON, FENCED, FUNCTION_XML]


def read(parsed: ParsedText) -> list[tuple[str, dict[str, object]]]:
    assert all(call.error is None for call in parsed.calls)
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize(
    "body", ['{"a":', "[]", '"str"', '{"arguments": {}}', '{"name": "f", "arguments": "{}"}']
)
def test_what_is_no_call_becomes_an_error_with_its_text(body: str) -> None:
    for text, parse in (
        (f"<tool_call>{body}</tool_call>", parse_hermes),
        (f"<|python_tag|>{body}", parse_llama_json),
        (f"```tool_call\n{body}\n```", parse_fenced),
        (f"<tool_call>{body}</tool_call>", parse_function_xml),
    ):
        (call,) = parse(text).calls
        assert call.error
        assert not call.arguments
        assert body in call.raw


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[]", "must be a JSON object such as"),
        ("null", "not null"),
        ('{"name": 3}', 'has no "name"'),
        ('{"name": ""}', 'has no "name"'),
        ('{"name": "f", "arguments": "{}"}', '"arguments" must be a JSON object such as {"x": 1}, not str'),
        ('{"name": "f"} and more', "unexpected text after"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 63 + "]" * 63 + "}}", "nested more than 64 deep"),
        ("", "not valid JSON"),
    ],
)
def test_errors_say_what_is_wrong(body: str, reason: str) -> None:
    call = read_json_call(body)
    assert call.error is not None
    assert reason in call.error


def test_arguments_may_be_nested_as_deep_as_anyone_writes() -> None:
    call = read_json_call('{"name": "f", "arguments": {"x": ' + "[" * 62 + "]" * 62 + "}}")
    assert call.error is None


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "f"', '<tool_call>{"name": "f"}', "a <tool_call>", "f</tool_call>"]
)
def test_a_cut_off_call_is_an_error(text: str) -> None:
    for parse in (parse_hermes, parse_function_xml):
        (call,) = parse(text).calls
        assert call.error is not None


def test_parallel_calls_and_text_around_them() -> None:
    one, two = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {"y": [2]}}'
    wanted = [("f", {"x": 1}), ("g", {"y": [2]})]
    parsed = parse_hermes(f"So: <tool_call>\n{one}\n</tool_call>\n<tool_call>{two}</tool_call> done")
    assert (read(parsed), parsed.text) == (wanted, "So: \n done")
    assert read(parse_llama_json(f"{one}; {two}")) == wanted
    assert read(parse_llama_json(f"<|python_tag|>{one}\n{two}")) == wanted
    assert read(parse_fenced(f"```tool_call\n{one}\n```\n```json\n{two}\n```")) == wanted


def test_a_good_call_beside_a_broken_one_survives() -> None:
    parsed = parse_hermes('<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>')
    assert [call.error is None for call in parsed.calls] == [True, False]


def test_calls_in_thinking_are_no_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse_hermes(f"<think>{call}</think>42") == ParsedText("42", (), call)
    assert parse_hermes(f"{call}</think>42") == ParsedText("42", (), call)
    assert parse_hermes(f"<think>{call}") == ParsedText("", (), call)
    parsed = parse_hermes(f"<think>a</think>{call}")
    assert read(parsed) == [("f", {})]
    assert parsed.reasoning == "a"


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", ["Answer: 42", "", "3 < 4 > 2", "[1, 2]", '"str"'])
def test_text_without_a_call_is_an_answer(parse: Parser, text: str) -> None:
    assert parse(text) == ParsedText(text, (), None)


def test_json_in_a_fence_is_an_answer_unless_it_reads_as_a_call() -> None:
    answer = 'Here:\n```json\n{"name": "Ada", "age": 36}\n```'
    assert parse_fenced(answer) == ParsedText(answer)


def test_a_closing_tag_inside_a_json_string_does_not_end_the_call() -> None:
    parsed = parse_hermes('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>')
    assert read(parsed) == [("f", {"x": "</tool_call>"})]


def test_function_xml_values() -> None:
    text = "\n".join(
        f"<parameter={k}>\n{v}\n</parameter>"
        for k, v in {"n": "5", "s": "007", "t": "true", "l": "[1, 2]", "q": '"a"', "m": "a\nb"}.items()
    )
    parsed = parse_function_xml(f"<tool_call>\n<function=f>\n{text}\n</function>\n</tool_call>")
    values = {"n": 5, "s": "007", "t": True, "l": [1, 2], "q": '"a"', "m": "a\nb"}
    assert read(parsed) == [("f", values)]


names = st.text(st.characters(codec="ascii", categories=("L", "Nd")), min_size=1, max_size=8)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", [PLAIN, HERMES, LLAMA_JSON], ids=lambda form: form.name)
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3))
def test_what_a_format_writes_it_reads(form: ToolFormat, calls: list[tuple[str, dict[str, object]]]) -> None:
    text = "\n".join(form.write(ToolCall(name, arguments)) for name, arguments in calls)
    assert read(form.parse(text)) == [(name, json.loads(json.dumps(a))) for name, a in calls]


_TAGS = "<tool_call> </tool_call> <think> </think> <|python_tag|> <function=f> </function> <parameter=x>"
_BITS = '</parameter> ``` ```tool_call\n { } [ ] , : "name" "f" \\ '
pieces = st.sampled_from(["\n", *f"{_TAGS} {_BITS}".split(" ")])


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=14).map("".join))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parse in PARSERS:
        for call in parse(text).calls:
            assert (call.error is None) == bool(call.name) or call.error is not None
