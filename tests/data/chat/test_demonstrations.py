"""Masks of supervised fine-tuning: by authorship. Faults 7, 14, 17, 19, 24."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_tokenizers import CHATML, bpe_tokenizer

from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tiny_tokenizer import ASCII, HIDDEN_DIGIT, tiny_tokenizer
from stepladder.errors import ConfigError, DataError, TemplateError
from stepladder.types import Generation, Message, Sampling, Tool, ToolCall

MARKS = ("<|im_start|>", "<|im_end|>")
REASONING = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nDefault.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def renderer_for(template: str = CHATML) -> Renderer:
    return Renderer(bpe_tokenizer(template, MARKS, ("<think>", "</think>"), eos="<|im_end|>"))


def trained(renderer: Renderer, sample: object) -> str:
    pairs = zip(sample.token_ids, sample.mask, strict=True)  # type: ignore[attr-defined]
    return renderer.decode([i for i, m in pairs if m])


def test_fault_17_the_trained_targets_are_exactly_the_completion_and_its_end() -> None:
    """<|user|>?<|end|><|assistant|> is [1, 4, 19, 7, 5]; the completion S<|end|> is [18, 7]."""
    renderer = Renderer(tiny_tokenizer(*HIDDEN_DIGIT))
    one = renderer.demonstration([Message("user", "?"), Message("assistant", "S")], trajectory_id="a")
    assert one[0].token_ids == (1, 4, 19, 7, 5, 18, 7)
    assert one[0].mask == (False,) * 5 + (True, True)
    conversation = renderer.start([Message("user", "?")])  # the same through a rollout
    conversation.add_turn(Generation((18, 7), (-1.0, -2.0), ((0, 2),), "stop"), Sampling())
    assert conversation.samples("a", "")[0].mask == one[0].mask
    assert conversation.samples("a", "")[0].token_ids == one[0].token_ids


def test_fault_14_and_19_no_generation_markers_are_needed_and_the_terminator_is_trained() -> None:
    renderer = renderer_for()
    assert "generation %}" not in renderer.tokenizer.chat_template
    messages = [
        Message("user", "Hi"),
        Message("assistant", "Ho"),
        Message("user", "?"),
        Message("assistant", "!"),
    ]
    (sample,) = renderer.demonstration(messages, trajectory_id="t")
    assert trained(renderer, sample) == "Ho<|im_end|>!<|im_end|>"
    (last,) = renderer.demonstration(messages, trajectory_id="t", train="last_turn")
    assert trained(renderer, last) == "!<|im_end|>"
    assert last.token_ids == sample.token_ids
    (full,) = renderer.demonstration(messages, trajectory_id="t", train="full")
    assert full.mask == (False, *[True] * (len(full.token_ids) - 1))
    assert set(sample.behaviour_logprobs) == {0.0}


@pytest.mark.parametrize(
    "messages", [[], [Message("user", "Hi")], [Message("assistant", "Ho")], [Message("system", "S")]]
)
def test_fault_14_nothing_to_train_is_an_error(messages: list[Message]) -> None:
    with pytest.raises(DataError, match="user message followed by an assistant message"):
        renderer_for().demonstration(messages, trajectory_id="t")


def test_two_assistant_messages_in_a_row_are_refused() -> None:
    messages = [Message("user", "Hi"), Message("assistant", "Ho"), Message("assistant", "Hum")]
    with pytest.raises(DataError, match="messages 1 and 2 are both the assistant's"):
        renderer_for().demonstration(messages, trajectory_id="t")


def test_fault_24_a_text_that_is_repeated_in_other_turns_is_no_trap() -> None:
    renderer = renderer_for()
    messages = [
        Message("user", "yes"),
        Message("assistant", "yes"),
        Message("user", "assistant\nyes"),
        Message("assistant", "yes"),
        Message("user", "yes"),
    ]
    (sample,) = renderer.demonstration(messages, trajectory_id="t")
    assert trained(renderer, sample) == "yes<|im_end|>yes<|im_end|>"
    turns = [[i for i, turn in enumerate(sample.turn_ids) if turn == k] for k in (0, 1)]
    before = [renderer.decode(sample.token_ids[: turn[0]]) for turn in turns]
    assert all(text.endswith("<|im_start|>assistant\n") for text in before)
    assert sample.mask[-1]  # the last user message is left out


def test_fault_07_the_whole_conversation_is_rendered_once() -> None:
    renderer = renderer_for(REASONING)
    messages = [
        Message("user", "2?"),
        Message("assistant", "Two.", reasoning="because"),
        Message("user", "3?"),
        Message("assistant", "Three.", reasoning="therefore"),
    ]
    (sample,) = renderer.demonstration(messages, trajectory_id="t")
    text = renderer.decode(sample.token_ids)
    assert [text.count(part) for part in ("because", "therefore", "Default.")] == [1, 1, 1]
    assert trained(renderer, sample) == (
        "<think>because</think>Two.<|im_end|><think>therefore</think>Three.<|im_end|>"
    )


def test_a_demonstration_is_spelled_as_other_software_spells_it() -> None:
    renderer = renderer_for()
    tool = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})
    messages = [
        Message("user", "1?"),
        Message("assistant", "", (ToolCall("add", {"a": 1}, id="c0"),)),
        Message("tool", "1", tool_call_id="c0"),
        Message("assistant", "One."),
    ]
    (sample,) = renderer.demonstration(messages, [tool], trajectory_id="t")
    rows = [message.to_dict() for message in messages]
    own = renderer.tokenizer.apply_chat_template(rows, tools=[tool.to_dict()], return_dict=False)
    assert list(sample.token_ids) == own[: len(sample.token_ids)]
    assert renderer.decode(own[len(sample.token_ids) :]) == "\n"


# -- the tiny tokenizer -------------------------------------------------------------------------------------


def test_the_tiny_tokenizer_round_trips_and_saves(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer()
    text = "".join(ASCII)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("a<|end|>\n") == tokenizer.encode("a<|end|>\n")
    assert Renderer(loaded).tool_format.name == "plain"


def test_an_alphabet_that_cannot_spell_tools_refuses_them() -> None:
    renderer = Renderer(tiny_tokenizer(*HIDDEN_DIGIT))
    assert renderer.tool_format.name == "none"
    with pytest.raises(TemplateError, match="shows no tools"):
        renderer.start([Message("user", "?")], [Tool("search", "Search.", {})])
    conversation = renderer.start([Message("user", "?")])
    conversation.add_turn(Generation((18, 7), (-1.0, -1.0), ((0, 2),), "stop"), Sampling())
    conversation.add_messages([Message("tool", "3")])
    assert renderer.decode(conversation.prompt_ids).endswith("S<|end|><|tool|>3<|end|><|assistant|>")
    with pytest.raises(ConfigError, match="one character"):
        tiny_tokenizer("ab")
