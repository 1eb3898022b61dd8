"""Content never becomes control, and ids are the template's own where it holds no markers. Faults 10, 11."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from chat_tokenizers import CHATML, bpe_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, processors

from stepladder.data.chat.control import ControlText
from stepladder.data.chat.renderer import Renderer
from stepladder.types import Generation, Message, Sampling, Tool, ToolCall

# Trims, splits at </think>, writes tool results as JSON: what templates do to content.
BUSY = """
{{- bos_token }}
{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{{- m.content.split('</think>')[-1] | trim }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<tool_response>' + (m.content | tojson) + '</tool_response>' }}
{%- else %}
{{- m.content | trim }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<image>", "<|im_end|>x")
STRUCTURAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
RENDERERS = {
    name: Renderer(bpe_tokenizer(template, SPECIAL, STRUCTURAL, eos="<|im_end|>"))
    for name, template in (("chatml", CHATML), ("busy", BUSY))
}
MARKERS = (*SPECIAL, *STRUCTURAL, "<bos>")

pieces = st.lists(
    st.one_of(
        st.sampled_from(MARKERS),
        st.sampled_from(["<|im_", "end|>", "<", ">", "|", "<|", "\n", " ", "{", '"', "\\", "</thi", "nk>"]),
        st.text(st.characters(codec="utf-8"), max_size=8),
    ),
    max_size=8,
)


def control_counts(renderer: Renderer, user: str, result: str) -> Counter[int]:
    """Control ids of two prompts of one conversation."""
    tool = Tool("look", f"Looks. {user}", {"type": "object", "properties": {}})
    conversation = renderer.start([Message("system", user), Message("user", user)], [tool])
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
    ids = tuple(renderer.tokenizer.encode(call, add_special_tokens=False))
    conversation.add_turn(Generation(ids, (-1.0,) * len(ids), ((0, len(ids)),), "stop"), Sampling())
    conversation.add_messages([Message("tool", result)])
    known = set(renderer.control.ids.values())
    return Counter(i for i in conversation.prompt_ids if i in known)


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=120, deadline=None)
@given(user=pieces, result=pieces)
def test_no_control_id_appears_that_the_markerless_conversation_has_not(
    name: str, user: list[str], result: list[str]
) -> None:
    renderer = RENDERERS[name]
    planted = control_counts(renderer, "a" + "".join(user), "a" + "".join(result))
    assert planted == control_counts(renderer, "a", "a")


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=60))
def test_ids_are_the_templates_own_where_content_is_free_of_markers(text: str) -> None:
    renderer = RENDERERS["chatml"]
    conversation = renderer.start([Message("system", "Be kind."), Message("user", text)])
    rows = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
    own = renderer.tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False)
    assert list(conversation.prompt_ids) == own
    assert conversation.neutralised == 0


@settings(max_examples=100, deadline=None)
@given(parts=pieces)
def test_neutralised_content_still_reads_the_same(parts: list[str]) -> None:
    renderer = RENDERERS["chatml"]
    text = "".join(parts)
    conversation = renderer.start([Message("user", text)])
    assert renderer.decode(conversation.prompt_ids) == (
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_neutralised_markers_are_counted() -> None:
    conversation = RENDERERS["chatml"].start([Message("user", "<|im_end|> and <think>, <|im_end|>")])
    assert conversation.neutralised == 3


def test_an_assistants_structural_tokens_stay_but_its_special_ones_do_not() -> None:
    renderer = RENDERERS["busy"]
    call = ToolCall("look", {"q": "</tool_call><|im_end|>"})
    (sample,) = renderer.demonstration(
        [Message("user", "Hi"), Message("assistant", "<|im_end|>So", (call,))],
        [Tool("look", "Looks.", {"type": "object", "properties": {}})],
        trajectory_id="t",
    )
    tokens = renderer.tokenizer.convert_ids_to_tokens(
        [i for i, m in zip(sample.token_ids, sample.mask, strict=True) if m]
    )
    assert [t for t in tokens if t in MARKERS] == ["<tool_call>", "</tool_call>", "<|im_end|>"]
    assert tokens[-1] == "<|im_end|>"


def test_lone_surrogates_do_not_crash() -> None:
    assert RENDERERS["chatml"].start([Message("user", "a\ud800b")]).prompt_ids


def test_markers_that_only_the_normaliser_reveals_are_found() -> None:
    token = AddedToken("<|stop|>", special=False, normalized=True)
    tokenizer = bpe_tokenizer(CHATML, SPECIAL, eos="<|im_end|>", tokens=[token])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    wide = "<｜stop｜>".replace("<", "＜").replace(">", "＞")
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    assert stop in tokenizer.encode(wide)  # the trap is real
    assert stop not in Renderer(tokenizer).start([Message("user", wide)]).prompt_ids


def bos_tokenizer(template: str) -> Any:
    """Like Llama's: the tokenizer itself puts a BOS in front of a text."""
    tokenizer = bpe_tokenizer(template, SPECIAL, eos="<|im_end|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    return tokenizer


def test_fault_10_and_11_exactly_one_bos_in_chat_and_raw_prompts() -> None:
    renderer = Renderer(bos_tokenizer("{{ bos_token }}" + CHATML))
    bos = renderer.tokenizer.bos_token_id
    messages = [Message("user", "Hi <bos>"), Message("assistant", "Ho")]
    assert renderer.start(messages[:1]).prompt_ids.count(bos) == 1
    (sample,) = renderer.demonstration(messages, trajectory_id="t")
    assert sample.token_ids.count(bos) == 1
    assert sample.token_ids[0] == bos
    for text in ("Once", "<bos>Once"):
        assert renderer.raw_prompt(text).count(bos) == 1
        assert renderer.raw_prompt(text)[0] == bos
    plain = Renderer(bpe_tokenizer(CHATML, SPECIAL, eos="<|im_end|>"))
    assert bos not in plain.raw_prompt("Once")  # that tokenizer adds none


def test_text_after_a_token_is_encoded_as_inside_a_text_not_as_its_start() -> None:
    """A tokenizer that puts a space before the first word must not do so at every delta."""
    from tokenizers import pre_tokenizers

    tokenizer = bpe_tokenizer(CHATML, SPECIAL, eos="<|im_end|>")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = ControlText(tokenizer)
    end = tokenizer.eos_token_id
    whole = tokenizer.encode("word<|im_end|>word", add_special_tokens=False)
    assert [*control.encode("word"), end, *control.encode("word", after=end)] == whole
    assert control.encode("word") != control.encode("word", after=end)
