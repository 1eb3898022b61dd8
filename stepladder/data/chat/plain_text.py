"""Text as a base model reads it: no chat template, one BOS, content that never becomes a control token."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.chat.control import ControlText, Tokenizer
from stepladder.data.encoder import Side, Train
from stepladder.errors import DataError, TemplateError
from stepladder.types import Message, Tool, TrainingSample


class PlainText:
    """Stands where a `Renderer` does for a tokenizer without a chat template. Prompts are strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.control = ControlText(tokenizer)
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so no text can end; set tokenizer.eos_token"
            )
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self.control.never_structural(self.stop_token_ids)

    def raw_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt: one BOS where the tokenizer adds one, markers as text."""
        return raw_prompt(self.tokenizer, self.control, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out, nothing tidied."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def whole_text(self, text: str) -> list[int]:
        return whole_text(self.tokenizer, self.control, text)

    def demonstration(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        trajectory_id: str,
        group_id: str,
        train: Train = "assistant",
        answers_from: int = 0,
    ) -> tuple[TrainingSample, ...]:
        """Raise TemplateError: a conversation of several turns needs a chat template."""
        raise TemplateError(
            "the tokenizer has no chat template, so a conversation cannot be rendered; use an instruct "
            "model, or set tokenizer.chat_template"
        )

    def completed(
        self, prompt: Side, completion: Side, tools: Sequence[Tool], *, trajectory_id: str, group_id: str
    ) -> TrainingSample:
        ours = one_message(prompt, "user"), one_message(completion, "assistant")
        return raw_sample(self.tokenizer, self.control, *ours, trajectory_id, group_id)

    def frame(self, prompt: Side, tools: Sequence[Tool], prompt_ids: Sequence[int]) -> tuple[int, int]:
        return int(prompt_ids[0] == self.tokenizer.bos_token_id), 0

    def answered(self, prompt: Sequence[Message], answer: str) -> tuple[tuple[int, ...], str, str]:
        ids = self.raw_prompt(one_message(prompt, "user"))
        return ids, self.control.shield(answer), str(self.tokenizer.eos_token)

    def shield(self, text: str) -> str:
        return self.control.shield(text)

    def encode(self, shielded: str, *, after: int | None = None) -> list[int]:
        return self.control.encode(shielded, after=after)


def one_message(side: Side, role: str) -> str:
    """Return the text of one message of `role`, for a tokenizer that knows no others."""
    if isinstance(side, str):
        return side
    if [m.role for m in side] != [role] or side[0].tool_calls:
        raise TemplateError(
            f"the tokenizer has no chat template, so only one message of the {role} can be read as plain "
            f"text; got the roles {[m.role for m in side]}. Use an instruct model, or set "
            "tokenizer.chat_template"
        )
    return side[0].text


def whole_text(tokenizer: Tokenizer, control: ControlText, text: str) -> list[int]:
    """Return the ids of a text from its BOS to the end-of-sequence token."""
    return [*raw_prompt(tokenizer, control, text), int(tokenizer.eos_token_id)]


def raw_sample(
    tokenizer: Tokenizer,
    control: ControlText,
    prompt: str,
    completion: str,
    trajectory_id: str,
    group_id: str,
) -> TrainingSample:
    """Return a prompt and a completion that no template wraps, the latter trained with its end."""
    ids = raw_prompt(tokenizer, control, prompt)
    if not ids:
        raise DataError("the prompt is empty and the tokenizer adds no BOS: nothing precedes the completion")
    own = raw_completion(tokenizer, control, completion, ids[-1])
    n = len(ids)
    return TrainingSample(
        (*ids, *own),
        (False,) * n + (True,) * len(own),
        (0.0,) * (n + len(own)),
        trajectory_id,
        (-1,) * n + (0,) * len(own),
        group_id,
    )


def raw_prompt(tokenizer: Tokenizer, control: ControlText, text: str) -> tuple[int, ...]:
    """Ids of a text that no template wraps. A BOS that the text spells itself is not doubled."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    if adds_bos:
        text = text.removeprefix(str(tokenizer.bos_token))
    ids = control.encode(control.shield(text))
    return (bos, *ids) if adds_bos else tuple(ids)


def raw_completion(tokenizer: Tokenizer, control: ControlText, text: str, after: int | None) -> list[int]:
    """Ids of an answer that follows the token `after`, with the end-of-sequence token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end-of-sequence token; set tokenizer.eos_token")
    return [*control.encode(control.shield(text), after=after), int(end)]
