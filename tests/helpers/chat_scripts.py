"""Scripted conversations, held by any renderer; the scripted policy speaks as the template would write.

The oracle is transformers' own `apply_chat_template` on plain OpenAI dictionaries; nothing of
`stepladder.data` decides what the right prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chat_tokenizers import tokenizer_for

from stepladder.data.chat.conversation import Conversation
from stepladder.data.chat.renderer import Renderer
from stepladder.errors import TemplateError
from stepladder.types import Generation, Message, Sampling, Tool, ToolCall

ADD = Tool(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
ASK = Message("user", "What is 2 + 2?")
AGAIN = Message("user", "And the search?")
CALL = ToolCall("add", {"a": 1, "b": 2}, id="call00000")
OTHER = ToolCall("add", {"a": 3, "b": 4}, id="call00001")
RESULT = Message("tool", "3", tool_call_id="call00000", name="add")
OTHER_RESULT = Message("tool", "7", tool_call_id="call00001", name="add")

# script -> (tools, opening, then assistant messages and lists of replies in turn)
SCRIPTS: dict[str, tuple[tuple[Tool, ...], list[Message], list[Any]]] = {
    "plain": (
        (),
        [ASK],
        [Message("assistant", "Four."), [AGAIN], Message("assistant", "Five."), [ASK]],
    ),
    "tool": (
        (ADD,),
        [Message("system", "Be short."), ASK],
        [Message("assistant", "", (CALL,)), [RESULT], Message("assistant", "Three.")],
    ),
    "parallel": (
        (ADD,),
        [ASK],
        [Message("assistant", "", (CALL, OTHER)), [RESULT, OTHER_RESULT], Message("assistant", "Ten.")],
    ),
    "think": (
        (),
        [ASK],
        [Message("assistant", "Four.", reasoning="Because."), [AGAIN], Message("assistant", "Five.")],
    ),
    "think_tool": (
        (ADD,),
        [ASK],
        [Message("assistant", "", (CALL,), reasoning="Because."), [RESULT], Message("assistant", "Three.")],
    ),
}

# What the tokenizers of these families have as end-of-sequence token; elsewhere a token no template names.
EOS = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gptoss": "<|return|>",
    "llava": "</s>",
}
# ... and what their generation config adds.
EXTRA = {"gptoss": ("<|call|>",), "glm4moe": ("<|observation|>", "<|user|>")}


@dataclass
class Held:
    """A conversation that was held, and what was sampled in it."""

    conversation: Conversation
    outcome: str  # the outcome of the first continuation: same, delta or split; or "refused"
    sampled: list[tuple[int, ...]] = field(default_factory=list)


def make_renderer(name: str, template: str) -> Renderer:
    """A renderer over a tokenizer made for the template."""
    eos = next((token for family, token in EOS.items() if name.startswith(family)), "<eos>")
    tokenizer = tokenizer_for(template, eos=eos)
    return Renderer(tokenizer, extra_stop_ids=tokenizer.convert_tokens_to_ids(list(EXTRA.get(name, ()))))


def template_text(renderer: Renderer, messages: Any, tools: Any, generation_prompt: bool) -> str:
    """What transformers makes of the messages, given as plain dictionaries."""
    rows = []
    for message in messages:
        row = message.to_dict()
        if message.reasoning is not None and not renderer.dialect.reasoning:
            row["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{row['content']}"
        if renderer.dialect.parts and isinstance(row["content"], str):
            row["content"] = [{"type": "text", "text": row["content"]}]
        rows.append(row)
    text = renderer.tokenizer.apply_chat_template(
        rows,
        tools=[tool.to_dict() for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
    )
    return str(text)


def template_ids(renderer: Renderer, messages: Any, tools: Any, generation_prompt: bool = True) -> list[int]:
    text = template_text(renderer, messages, tools, generation_prompt)
    return list(renderer.tokenizer.encode(text, add_special_tokens=False))


def natural_text(renderer: Renderer, history: Any, message: Message, tools: Any) -> str:
    """The assistant's message as its template writes it after the generation prompt, terminator included."""
    prompt = template_text(renderer, history, tools, True)
    whole = template_text(renderer, [*history, message], tools, False)
    if whole.startswith(prompt):
        own = whole[len(prompt) :]
    else:  # the generation prompt opens a thinking block that the template does not write back
        opened = prompt.rstrip().endswith("<think>")
        closing = f"{message.reasoning or ''}\n</think>\n\n" if opened else ""
        calls = [renderer.tool_format.write(call) for call in message.tool_calls]
        own = closing + "\n".join([message.text, *calls]).strip()
    stop = renderer.stop_pattern.search(own)
    return own[: stop.end()] if stop else own.rstrip("\n") + terminator(renderer)


def terminator(renderer: Renderer) -> str:
    """The stop token that the template writes after an assistant's turn; else a stop the model was given."""
    found = renderer.stop_pattern.search(renderer.dialect.end_text)
    return found.group() if found else renderer.stop_text(renderer.stop_token_ids[-1])


def sampled(renderer: Renderer, text: str) -> Generation:
    ids = tuple(renderer.tokenizer.encode(text, add_special_tokens=False))
    return Generation(ids, tuple(-0.01 * (i + 1) for i in range(len(ids))), ((0, len(ids)),), "stop")


def run(renderer: Renderer, script: Any, *, verbose: bool = False) -> Held:
    """Hold a scripted conversation. The outcome compares the prompt after the first reply with the oracle."""
    tools, opening, steps = script
    conversation = renderer.start(opening, tools)
    held = Held(conversation, "")
    said = list(opening)
    for step in steps:
        if isinstance(step, Message):
            try:
                text = natural_text(renderer, said, step, tools)
            except Exception as problem:  # the template cannot write it; the policy may still say it
                if verbose:
                    print("raises", problem)
                text = "\n".join(map(renderer.tool_format.write, step.tool_calls))
                text += terminator(renderer)
            generation = sampled(renderer, text)
            conversation.add_turn(generation, Sampling())
            held.sampled.append(generation.token_ids)
            said.append(step)
            continue
        said += step
        edits = conversation.history_edits
        try:
            conversation.add_messages(step)
        except TemplateError as problem:
            if verbose:
                print("refused", problem)
            held.outcome = held.outcome or "refused"
            return held
        try:
            same = list(conversation.prompt_ids) == template_ids(renderer, said, tools)
        except Exception:
            same = False
        if verbose and not same:
            print(repr(renderer.decode(conversation.prompt_ids)))
            print(repr(template_text(renderer, said, tools, True)))
        outcome = "split" if conversation.history_edits > edits else "same" if same else "delta"
        held.outcome = held.outcome or outcome
    return held
