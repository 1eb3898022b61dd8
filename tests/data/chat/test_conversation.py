"""Conversations on ChatML and its kind: prompts, masks, glue, edits. Faults 2, 4-6, 8, 9, 13, 18-21."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, PICTURES, bpe_tokenizer

from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tool_format import HERMES
from stepladder.errors import DataError, EngineError, InvariantError, TemplateError
from stepladder.types import Generation, ImagePart, Message, Sampling, TextPart, Tool, TrainingSample

ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})
ASK = Message("user", "What is 2 + 2?")
MARKS = ("<|im_start|>", "<|im_end|>")

# ChatML that drops thinking from all but the last assistant message, as Qwen 3 does.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The generation prompt opens the thinking block, the history renders it whole.
OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content is string %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + m.role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"
)


def renderer_for(template: str = CHATML, **options: object) -> Renderer:
    marks = ("<start_of_turn>", "<end_of_turn>") if template is STRICT else MARKS
    eos = "<eos>" if template is STRICT else "<|im_end|>"
    return Renderer(bpe_tokenizer(template, marks, ("<think>", "</think>"), eos=eos), **options)  # type: ignore[arg-type]


def generation(renderer: Renderer, text: str, finish: str = "stop") -> Generation:
    ids = tuple(renderer.tokenizer.encode(text, add_special_tokens=False))
    return Generation(ids, (-0.5,) * len(ids), ((3, len(ids)),), finish)  # type: ignore[arg-type]


def trained_text(renderer: Renderer, sample: TrainingSample) -> str:
    return renderer.decode([i for i, m in zip(sample.token_ids, sample.mask, strict=True) if m])


def test_fault_05_and_06_glue_and_generation_prompt_are_context_with_mask_0() -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK])
    conversation.add_turn(generation(renderer, "Four.<|im_end|>"), Sampling())
    conversation.add_messages([Message("user", "Sure?")])
    conversation.add_turn(generation(renderer, "Yes.<|im_end|>"), Sampling())
    (sample,) = conversation.samples("t", "g")
    whole = (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    assert list(sample.token_ids) == renderer.tokenizer.encode(whole, add_special_tokens=False)
    assert trained_text(renderer, sample) == "Four.<|im_end|>Yes.<|im_end|>"
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    first = sample.token_ids.index(end, len(conversation.turns[0].prompt_ids))
    assert sample.mask[first]
    assert not sample.mask[first + 1]
    assert renderer.decode([sample.token_ids[first + 1]]) == "\n"


def test_turns_hold_the_exact_prompt_and_ids() -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK])
    prompt = conversation.prompt_ids
    made = generation(renderer, "Four.<|im_end|>")
    message = conversation.add_turn(made, Sampling(temperature=0.7))
    (turn,) = conversation.turns
    assert (turn.prompt_ids, turn.token_ids, turn.logprobs) == (prompt, made.token_ids, made.logprobs)
    assert (turn.versions, turn.sampling.temperature) == (((3, len(made.token_ids)),), 0.7)
    assert (message.raw, message.text) == ("Four.", "Four.")
    with pytest.raises(InvariantError, match="add_messages"):
        _ = conversation.prompt_ids


def test_fault_08_tool_json_spelled_by_the_model_keeps_the_prefix() -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK], [ADD])
    spelled = 'So.  <tool_call>{"arguments" :{"a":1},\n"name":"add"}</tool_call>  <|im_end|>'
    before = conversation.prompt_ids
    made = generation(renderer, spelled)
    message = conversation.add_turn(made, Sampling())
    assert message.tool_calls[0].arguments == {"a": 1}
    conversation.add_messages([Message("tool", "1", tool_call_id=message.tool_calls[0].id)])
    assert conversation.history_edits == 0
    assert conversation.prompt_ids[: len(before) + len(made.token_ids)] == before + made.token_ids
    tail = renderer.decode(conversation.prompt_ids[len(before) + len(made.token_ids) :])
    assert tail == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "broken", ['<tool_call>{"a":</tool_call>', "<tool_call>[]</tool_call>", "<tool_call>{"]
)
def test_a_broken_call_keeps_the_prefix_too(broken: str) -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK], [ADD])
    message = conversation.add_turn(generation(renderer, broken + "<|im_end|>"), Sampling())
    assert message.tool_calls[0].error
    conversation.add_messages([Message("tool", "Error.", tool_call_id=message.tool_calls[0].id)])
    assert conversation.history_edits == 0


def test_fault_04_a_thinking_block_opened_by_the_prompt_stays_one_block() -> None:
    renderer = renderer_for(OPENED)
    conversation = renderer.start([ASK])
    assert renderer.decode(conversation.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    message = conversation.add_turn(generation(renderer, "x</think>y<|im_end|>"), Sampling())
    assert (message.reasoning, message.text, message.raw) == ("x", "y", "x</think>y")
    conversation.add_messages([Message("user", "And?")])
    text = renderer.decode(conversation.prompt_ids).removesuffix("<think>\n")
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    assert "<think>\nx</think>y<|im_end|>\n<|im_start|>user\nAnd?" in text


def test_a_call_inside_thinking_is_no_call_even_when_the_prompt_opened_it() -> None:
    renderer = renderer_for(OPENED)
    conversation = renderer.start([ASK], [ADD])
    text = 'maybe <tool_call>{"name": "add"}</tool_call></think>Four.<|im_end|>'
    message = conversation.add_turn(generation(renderer, text), Sampling())
    assert (message.tool_calls, message.text) == ((), "Four.")


def test_an_edited_history_begins_a_new_sample_of_the_same_trajectory() -> None:
    renderer = renderer_for(FORGETFUL)
    conversation = renderer.start([ASK])
    conversation.add_turn(generation(renderer, "<think>\nHm.\n</think>\n\nFour.<|im_end|>"), Sampling())
    conversation.add_messages([Message("user", "Sure?")])
    assert conversation.history_edits == 1
    assert "Hm." not in renderer.decode(conversation.prompt_ids)
    conversation.add_turn(generation(renderer, "Yes.<|im_end|>"), Sampling())
    first, second = conversation.samples("t", "g")
    assert trained_text(renderer, first) == "<think>\nHm.\n</think>\n\nFour.<|im_end|>"
    assert trained_text(renderer, second) == "Yes.<|im_end|>"
    assert {first.trajectory_id, second.trajectory_id} == {"t"}
    assert set(second.turn_ids) == {-1, 1}  # fault 21: the assistant's earlier turn is history, mask 0


def test_an_edited_history_is_refused_with_the_differing_token_on_request() -> None:
    renderer = renderer_for(FORGETFUL, on_history_edit="error")
    conversation = renderer.start([ASK])
    conversation.add_turn(generation(renderer, "<think>Hm.</think>Four.<|im_end|>"), Sampling())
    with pytest.raises(TemplateError, match=r"token \d+ was '<think>'.*would become 'F"):
        conversation.add_messages([Message("user", "Sure?")])


def test_a_turn_cut_by_length_gets_its_terminator_with_mask_0() -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK])
    conversation.add_turn(generation(renderer, "Four and", "length"), Sampling())
    conversation.add_messages([Message("user", "Go on.")])
    conversation.add_turn(generation(renderer, "so.<|im_end|>"), Sampling())
    (sample,) = conversation.samples("t", "g")
    assert "Four and<|im_end|>\n<|im_start|>user" in renderer.decode(sample.token_ids)
    assert trained_text(renderer, sample) == "Four andso.<|im_end|>"


def test_fault_18_and_20_any_end_id_ends_a_turn_and_is_trained() -> None:
    tokenizer = bpe_tokenizer(CHATML, (*MARKS, "<|endoftext|>"), eos="<|im_end|>")
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    renderer = Renderer(tokenizer, extra_stop_ids=[other])
    assert set(renderer.stop_token_ids) == {tokenizer.eos_token_id, other}
    conversation = renderer.start([ASK])
    assert conversation.add_turn(generation(renderer, "Four.<|endoftext|>"), Sampling()).raw == "Four."
    conversation.add_messages([Message("user", "Sure?")])  # the template's own terminator follows, mask 0
    assert "Four.<|endoftext|><|im_end|>\n<|im_start|>user" in renderer.decode(conversation.prompt_ids)
    (sample,) = conversation.samples("t", "g")
    assert sample.token_ids[-1] == other
    assert sample.mask[-1]


def test_fault_19_the_templates_terminator_is_a_stop_though_it_is_not_eos() -> None:
    renderer = renderer_for(STRICT)
    stops = [renderer.decode([i]) for i in renderer.stop_token_ids]
    assert sorted(stops) == ["<end_of_turn>", "<eos>"]


def test_fault_02_and_09_ids_are_stored_whatever_text_they_spell() -> None:
    """An id sequence the tokenizer would never produce, with a special token in the middle."""
    renderer = renderer_for()
    encode = renderer.tokenizer.convert_tokens_to_ids
    ids = (encode("F"), encode("o"), encode("u"), encode("<|im_start|>"), encode("r"), encode("<|im_end|>"))
    assert renderer.tokenizer.encode("Four") != [*list(ids[:3]), ids[4]]
    conversation = renderer.start([ASK])
    made = Generation(ids, (-1.0,) * 6, ((0, 6),), "stop")
    assert conversation.add_turn(made, Sampling()).raw == "Fou<|im_start|>r"
    conversation.add_messages([Message("user", "What?")])
    (sample,) = conversation.samples("t", "g")
    assert tuple(i for i, m in zip(sample.token_ids, sample.mask, strict=True) if m) == ids
    assert len(sample.token_ids) == len(sample.mask) == len(sample.behaviour_logprobs)


def test_fault_13_ids_that_do_not_spell_the_engines_text_are_refused() -> None:
    renderer = renderer_for()
    conversation = renderer.start([ASK])
    with pytest.raises(EngineError, match="Five"):
        conversation.add_turn(generation(renderer, "Four.<|im_end|>"), Sampling(), text="Five.")
    with pytest.raises(EngineError, match="no tokens"):
        conversation.add_turn(Generation((), (), (), "stop"), Sampling())
    conversation.add_turn(generation(renderer, "Four.<|im_end|>"), Sampling(), text="Four.")


def test_replies_may_come_in_pieces_before_the_next_turn() -> None:
    renderer = renderer_for()
    replies = [Message("user", "One."), Message("user", "Two.")]
    prompts = []
    for pieces in ([replies], [replies[:1], replies[1:]]):
        conversation = renderer.start([ASK])
        conversation.add_turn(generation(renderer, "Four.<|im_end|>"), Sampling())
        for piece in pieces:
            conversation.add_messages(piece)
        prompts.append(conversation.prompt_ids)
    assert prompts[0] == prompts[1]


def test_a_template_that_refuses_says_what_to_do() -> None:
    renderer = renderer_for(STRICT)
    with pytest.raises(TemplateError, match=r"Roles received: user, user\. Join neighbouring user messages"):
        renderer.start([ASK, ASK])
    with pytest.raises(TemplateError, match="no chat template"):
        Renderer(bpe_tokenizer("", MARKS))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_system_message_goes_into_the_first_user_message_where_there_is_no_role(wrapped: bool) -> None:
    """By the Jinja prelude where the template is wrapped, by the renderer where it is not."""
    tokenizer = bpe_tokenizer(STRICT, ("<start_of_turn>", "<end_of_turn>"))
    renderer = Renderer(tokenizer, None if wrapped else HERMES)
    conversation = renderer.start([Message("system", "Be short."), ASK])
    assert renderer.decode(conversation.prompt_ids) == (
        "<bos><start_of_turn>user\nBe short.\n\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>assistant\n"
    )
    if not wrapped:
        with pytest.raises(DataError, match="let a user message follow"):
            renderer.start([Message("system", "Be short.")])


def test_images_travel_as_references() -> None:
    renderer = Renderer(bpe_tokenizer(PICTURES, (*MARKS, "<image>"), eos="<|im_end|>"))
    picture = ImagePart("file:a.png")
    conversation = renderer.start([Message("user", (picture, TextPart("what? <image>")))])
    assert conversation.prompt_ids.count(renderer.tokenizer.convert_tokens_to_ids("<image>")) == 1
    conversation.add_turn(generation(renderer, "A cat.<|im_end|>"), Sampling())
    (sample,) = conversation.samples("t", "g")
    assert sample.images == (picture,)


def test_an_edit_far_back_in_the_history_is_seen_even_if_no_length_changes() -> None:
    """A header that counts the messages: the whole prompt moves on by one digit."""
    renderer = renderer_for("{{ 'n=' ~ messages | length }}" + CHATML)
    conversation = renderer.start([ASK])
    conversation.add_turn(generation(renderer, "Four.<|im_end|>"), Sampling())
    conversation.add_messages([Message("user", "Sure?")])
    assert conversation.history_edits == 1
    assert renderer.decode(conversation.prompt_ids).startswith("n=3<|im_start|>")
