"""Content never becomes control: markers inside content are encoded as the plain text they are.

A tokenizer matches its added tokens ("<|im_end|>", "<tool_call>", "<image>") anywhere in a string, so a tool
that prints "<|im_end|>" would end the turn. Before a template sees content, each such marker is replaced by
a sentinel (letters and digits, which survive strip, tojson and the like); the rendered text is split at the
sentinels, and the markers are encoded in pieces too small to match. Content free of markers is not touched:
its ids are the template's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import count
from typing import Any, TypeAlias

from stepladder.errors import InvariantError

# A transformers tokenizer with a fast backend. Any, because importing its class takes seconds.
Tokenizer: TypeAlias = Any


class ControlText:
    """The added tokens of one tokenizer: finds them in content, shields them, encodes rendered text.

    Whitespace runs and single characters that some tokenizers list as added tokens (Gemma's "\\n\\n") are
    text, not control.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if len(t.content.strip()) > 1}
        self.ids: dict[str, int] = {token.content: index for index, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._by_id = {index: text for text, index in self.ids.items()}
        self._control_ids = frozenset(self._by_id)
        self._all = _alternatives(self.ids)
        self._special = _alternatives(self._by_id[i] for i in self.special_ids)
        self._anchor = next((i for i, t in added.items() if not (t.lstrip or t.rstrip)), None)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalised = any(token.normalized for token in added.values())
        self._backend = backend if normalised and backend is not None and backend.normalizer else None
        # Random, so that no content can contain it; it never reaches an id.
        self._nonce = "x" + secrets.token_hex(8) + "x"
        self._sentinel = re.compile(self._nonce + r"(\d+)x")
        self._literals: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._fresh = count()
        self._plain: dict[tuple[str, int | None], list[int]] = {}

    def never_structural(self, ids: Iterable[int]) -> None:
        """Shield these tokens (stops not flagged special) in an assistant's own text too."""
        self.special_ids |= self._control_ids.intersection(ids)
        self._special = _alternatives(self._by_id[i] for i in self.special_ids)

    def shield(self, text: str, *, structural: bool = False) -> str:
        """`text` with its markers replaced by sentinels.

        `structural=True` (an assistant's own text) leaves added tokens that are not flagged special, such
        as <think> or <tool_call>: they are how an assistant speaks.
        """
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded by anything
        pattern = self._special if structural else self._all
        if pattern is not None:
            text = pattern.sub(lambda match: self._sentinel_for(match.group()), text)
        return text if self._backend is None else self._shield_normalised(text, structural)

    def _shield_normalised(self, text: str, structural: bool) -> str:
        """Markers that only the tokenizer's normaliser reveals (a full-width "<", say)."""
        watched = self.special_ids if structural else self._control_ids
        encoding = self._backend.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
        spans = [s for i, s in zip(encoding.ids, encoding.offsets, strict=True) if i in watched]
        for start, end in reversed(spans):
            text = text[:start] + self._sentinel_for(text[start:end]) + text[end:]
        return text

    def _sentinel_for(self, literal: str) -> str:
        number = self._numbers.get(literal)
        if number is None:  # in this order two threads may waste a number but never share one
            number = next(self._fresh)
            self._literals[number] = literal
            number = self._numbers.setdefault(literal, number)
        return f"{self._nonce}{number}x"

    def reveal(self, text: str) -> str:
        """The text with every sentinel turned back into the marker it stands for."""
        return self._sentinel.sub(lambda match: self._literals[int(match.group(1))], text)

    def count(self, text: str) -> int:
        """How many markers of this rendered text are shielded."""
        return len(self._sentinel.findall(text))

    def find(self, text: str) -> list[int]:
        """The added tokens that stand in a text of the template's own, in order."""
        return [] if self._all is None else [self.ids[m.group()] for m in self._all.finditer(text)]

    def text(self, token_id: int) -> str:
        """How an added token is written."""
        return self._by_id[token_id]

    def encode(self, text: str, *, after: int | None = None) -> list[int]:
        """Ids of rendered, shielded text. `after` is the id before it; None at the start of a prompt."""
        ids: list[int] = []
        for index, piece in enumerate(self._sentinel.split(text)):
            previous = ids[-1] if ids else after
            if index % 2:
                ids += self._encode_plain(self._literals[int(piece)], previous)
            elif piece:
                ids += self._encode_after(piece, previous)
        return ids

    def _encode_plain(self, literal: str, after: int | None) -> list[int]:
        """Ids of a marker as text: split until no piece matches an added token."""
        key = (literal, after if after is None or after in self._by_id else -1)
        if key not in self._plain:
            self._plain[key] = self._split(literal, after)
        return self._plain[key]

    def _split(self, literal: str, after: int | None) -> list[int]:
        ids = self._encode_after(literal, after)
        if self._control_ids.isdisjoint(ids):
            return ids
        if len(literal) == 1:
            raise InvariantError(
                f"the text {literal!r} cannot be encoded without the control token of the same spelling; "
                f"remove that added token from the tokenizer or the text from the content"
            )
        head = self._encode_plain(literal[0], after)
        return head + self._encode_plain(literal[1:], head[-1] if head else after)

    def _encode_after(self, text: str, after: int | None) -> list[int]:
        """Ids of `text` as it stands after a token, not at the start of a string.

        Some tokenizers put a space before the first word of a string, and some added tokens swallow the
        white space after them; an anchor token in front, dropped again, gives what a whole text would.
        """
        if after is None:
            return self._ids(text)
        anchor = after if after in self._by_id else self._anchor
        if anchor is not None:
            ids = self._ids(self._by_id[anchor] + text)
            if ids and ids[0] == anchor:
                return ids[1:]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
