"""An image reaches the prompt as the template's own placeholder, or the conversation is refused."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, PICTURES, bpe_tokenizer

from stepladder.data.chat.renderer import Renderer
from stepladder.errors import TemplateError
from stepladder.types import Generation, ImagePart, Message, Role, Sampling, TextPart

MARKS = ("<|im_start|>", "<|im_end|>", "<image>")
PICTURE = ImagePart("file:cat.png")
ASK = Message("user", "What is it?")
# Joins the text of parts and passes over the rest; ChatML that knows text parts only.
DROPPING = PICTURES.replace("default='<image>'", "default=''")
# Images of the user are shown, those of anyone else become a list's repr.
USER_ONLY = "{% for m in messages %}{% if m.role == 'user' %}" + PICTURES.removeprefix(
    "{% for m in messages %}"
).replace(
    "{% endfor %}",
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' ~ m['content'] ~ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}",
    1,
)
NO_SYSTEM = PICTURES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
)


def renderer(template: str) -> Renderer:
    return Renderer(bpe_tokenizer(template, MARKS, eos="<|im_end|>"))


def holding(role: Role) -> Message:
    return Message(role, (TextPart("Look: "), PICTURE), tool_call_id="c0" if role == "tool" else None)


@pytest.mark.parametrize(
    "template",
    [
        # A list concatenated to a text is an error of the template; joined by ~ it is the list's repr.
        CHATML,
        CHATML.replace("+ m['content'] +", "~ m['content'] ~"),
        CHATML.replace("+ m['content'] +", "~ m['content'] | tojson ~"),
        DROPPING,
    ],
    ids=["plus", "repr", "tojson", "dropped"],
)
def test_a_template_without_images_refuses_one(template: str) -> None:
    with pytest.raises(TemplateError, match=r"message of role 'user' holds an image .*cat\.png.*as text"):
        renderer(template).start([holding("user")])


def test_the_refusal_comes_in_the_middle_of_a_conversation_too() -> None:
    one = renderer(CHATML.replace("+ m['content'] +", "~ m['content'] ~"))
    conversation = one.start([ASK])
    ids = tuple(one.tokenizer.encode("A cat.<|im_end|>", add_special_tokens=False))
    conversation.add_turn(Generation(ids, (0.0,) * len(ids), ((0, len(ids)),), "stop"), Sampling())
    with pytest.raises(TemplateError, match="'user' holds an image"):
        conversation.add_messages([holding("user")])


@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_what_a_template_shows_is_asked_for_each_role(role: Role) -> None:
    messages = [*([] if role == "user" else [ASK]), holding(role)]
    one = renderer(PICTURES)
    assert one.start(messages).prompt_ids.count(one.tokenizer.convert_tokens_to_ids("<image>")) == 1
    if role == "assistant":
        with pytest.raises(TemplateError, match="role 'assistant' holds an image"):
            renderer(USER_ONLY).start(messages)
    else:  # tool results are shown as the user's
        assert one.start(messages).prompt_ids == renderer(USER_ONLY).start(messages).prompt_ids


def test_a_system_message_that_tools_are_written_into_shows_none() -> None:
    """Such a wrap keeps the system message's text only, so it is asked with tools."""
    with pytest.raises(TemplateError, match="role 'system' holds an image"):
        renderer(PICTURES).start([holding("system"), ASK])


def test_an_image_in_a_system_message_that_has_no_place_is_not_lost() -> None:
    with pytest.raises(TemplateError, match="role 'system' holds an image"):
        renderer(NO_SYSTEM).start([holding("system"), ASK])


def test_text_parts_alone_need_no_such_template() -> None:
    one = renderer(CHATML)
    parts = one.start([Message("user", (TextPart("What "), TextPart("is it?")))])
    assert parts.prompt_ids == one.start([ASK]).prompt_ids
