"""Text as a base model reads it: no chat template, one BOS, content that never becomes a control token."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.chat.control import ControlText, Tokenizer
from stepladder.errors import DataError


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
