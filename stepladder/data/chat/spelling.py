"""Headers that some templates put around reasoning and content, and that a sampled turn therefore holds.

gpt-oss writes "<|channel|>analysis<|message|>...<|end|>...<|channel|>final<|message|>...", Gemma 4
"<|channel>thought ... <channel|>", Cohere "...<|END_RESPONSE|>". What the probes saw is undone here, so that
everything else knows one spelling: "<think>...</think>text".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepladder.data.chat.control import ControlText
from stepladder.data.chat.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Spelling:
    """`lead` and `trail` stand around the content, `opening` and `closing` around reasoning before it.

    `mark` is the first control token of `closing`: it ends the reasoning even where something other than
    content follows. All are empty where a template writes plain text or the usual thinking tags.
    """

    lead: str
    trail: str
    opening: str
    closing: str
    mark: str

    @classmethod
    def of(cls, dialect: Dialect, control: ControlText, stop: re.Pattern[str]) -> Spelling:
        """From what the probes saw; only text with special tokens counts as a header."""

        def header(text: str) -> str:
            return text if control.special_ids.intersection(control.find(text)) else ""

        end = stop.search(dialect.end_text)
        opening, closing = header(dialect.opening), header(dialect.closing)
        marks = control.find(closing)
        known = bool(opening and closing and "<think>" not in opening)
        return cls(
            lead=header(dialect.lead),
            trail=header(dialect.end_text[: end.start()]) if end else "",
            opening=opening.rstrip("\n") if known else "",
            closing=closing.lstrip("\n") if known else "",
            mark=control.text(marks[0]) if known else "",
        )

    def plain(self, raw: str) -> str:
        """A sampled turn in the usual spelling."""
        raw = raw.removesuffix(self.trail)
        if not self.opening or not raw.startswith(self.opening):
            return raw.removeprefix(self.lead)
        body = raw[len(self.opening) :]
        for end in (self.closing, self.mark):
            reasoning, found, rest = body.partition(end)
            if found:
                return f"<think>{reasoning}</think>{rest}"
        return f"<think>{body}"
