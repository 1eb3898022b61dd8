"""Conversations to imitate: the mask of supervised fine-tuning, by authorship.

Each assistant turn is found as the difference between the template's text with and without it, so no
{% generation %} marker is needed and a text that appears twice is no trap. Its terminator is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepladder.data.chat.conversation import Conversation
from stepladder.data.chat.template import ChatTemplate
from stepladder.data.encoder import Train
from stepladder.errors import DataError, TemplateError
from stepladder.types import Message, Tool, TrainingSample


def demonstrate(
    renderer: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    trajectory_id: str,
    group_id: str = "",
    train: Train = "assistant",
    answers_from: int = 0,
) -> tuple[TrainingSample, ...]:
    """Training samples of one demonstrated conversation; `behaviour_logprobs` are 0.0.

    train="assistant": the mask is True on every assistant turn with its terminator. "last_turn": on the
    last one only. "completion": on all that follows the prompt, tool output and later questions too. "full":
    on every token but the first (plain language modelling). Where the template edits history there are
    several samples, each assistant turn trained once, in the context it was written in. Messages after the
    last assistant turn are left out. A template that drops reasoning and opens the thinking block in its
    generation prompt (DeepSeek) gets the turn in the form it would be sampled in.

    The first `answers_from` messages are a prompt, in which no assistant turn is trained (but "full" is);
    "completion" needs it.

    Raises `DataError` when there is no assistant turn to train on, `TemplateError` when the template cannot
    render the conversation or an assistant turn cannot be told from what is around it.
    """
    if train == "completion" and not answers_from:
        raise DataError(
            'train="completion" needs rows of a prompt and a completion, but this is a conversation without '
            'a mark where its prompt ends; use train="assistant" or "last_turn"'
        )
    turns = [i for i, m in enumerate(messages) if m.role == "assistant" and i >= answers_from]
    if not turns or turns[0] == 0:
        raise DataError(
            f"a demonstration needs a user message followed by an assistant message; "
            f"got the roles {[message.role for message in messages]}"
        )
    if messages[turns[0] - 1].role == "assistant":
        raise DataError(
            f"message {turns[0]} is the assistant's and so is the end of what it answers; join them into one"
        )
    renderer.require_tools(tools)
    conversation = Conversation(renderer, messages[: turns[0]], tools)
    for place, index in enumerate(turns):
        shielded, terminator = own_text(renderer, conversation, messages[index])
        ids = renderer.control.encode(shielded + terminator, after=conversation.prompt_ids[-1])
        text = renderer.control.reveal(shielded)
        last = place == len(turns) - 1
        conversation.add_own_text(text, ids, messages[index], trained=last or train != "last_turn")
        following = messages[index + 1 : len(messages) if last else turns[place + 1]]
        if not last:
            if not following:
                raise DataError(
                    f"messages {index} and {index + 1} are both the assistant's; join them into one"
                )
            conversation.add_messages(following)
    samples = conversation.samples(trajectory_id, group_id)
    if train == "full":
        return tuple(replace(s, mask=(False, *[True] * (len(s.token_ids) - 1))) for s in samples)
    if train == "completion":
        return tuple(_all_from_the_first(sample) for sample in samples)
    return samples


def _all_from_the_first(sample: TrainingSample) -> TrainingSample:
    """Every token trained from the first trained one on."""
    first = sample.mask.index(True)
    return replace(sample, mask=sample.mask[:first] + (True,) * (len(sample.mask) - first))


def own_text(renderer: ChatTemplate, conversation: Conversation, message: Message) -> tuple[str, str]:
    """(shielded text, terminator) of an assistant message after the current prompt."""
    before, whole = conversation.rendered_with(message)
    prefix = conversation.think_prefix
    if whole.startswith(before):
        own = whole[len(before) :]
    elif prefix and whole.startswith(before.removesuffix(prefix)):
        own = _continued(renderer, message, whole[len(before.removesuffix(prefix)) :], prefix)
    else:
        raise TemplateError(
            "the chat template renders an assistant message in a way its generation prompt does not begin: "
            f"the prompt ends {before[-60:]!r}, the message gives {whole[-120:]!r}. "
            "Use a template whose generation prompt is the start of an assistant message."
        )
    stop = renderer.stop_pattern.search(own)
    if stop is not None:
        return own[: stop.start()], stop.group()
    return own.removesuffix(renderer.end_text), renderer.terminator_after(message)


def _continued(renderer: ChatTemplate, message: Message, body: str, prefix: str) -> str:
    """The turn as it would be sampled after the thinking block that the prompt opened, or also closed."""
    shown, closed, answer = body.partition("</think>")
    if "</think>" in prefix:
        return answer.lstrip("\n") if closed else body
    if closed:
        return body.removeprefix("<think>").lstrip("\n")
    parsed = renderer.tool_format.parse(message.text)
    reasoning = message.reasoning if message.reasoning is not None else parsed.reasoning
    return f"{renderer.control.shield(reasoning or '', structural=True)}\n</think>\n\n{shown}"
