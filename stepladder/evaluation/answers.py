"""What an episode answered, written so that equal answers are equal texts: what votes are counted by."""

from __future__ import annotations

import re

from stepladder.rewards.reward import final_answer
from stepladder.types import Trajectory


def answer_of(trajectory: Trajectory) -> str | None:
    """Return what an episode answered, so that equal answers are equal texts; None for an empty one.

    It is `info["answer"]` where the environment gives it; else what stands after the last "answer:" or in the
    last boxed{} (without braces inside) of the last message, else all of it, as `canonical` writes it.
    """
    if "answer" in trajectory.info:
        return str(trajectory.info["answer"])
    return canonical(final_answer(trajectory))


def canonical(text: str) -> str | None:
    """Return the answer inside a text, in lower case, without what only surrounds it.

    White space, a full stop, marks of emphasis, quotes, a currency's sign, brackets around the whole and the
    bracket or stop after the letter of a choice go. Numbers lose commas and needless zeros. Units and words
    stay.

    >>> canonical("So. Answer: $1,200.0"), canonical("The answer: (B)."), canonical("**-.50**")
    ('1200', 'b', '-0.5')
    """
    found = list(re.finditer(r"answer\s*:|\\boxed\{([^{}]*)\}", text, re.IGNORECASE))
    if found:
        text = found[-1].group(1) or text[found[-1].end() :]
    text = _bare(" ".join(text.lower().split()))
    if not text:
        return None
    if re.fullmatch(r"[+-]?(\d+(,\d{3})*|\d*)(\.\d+)?", text) and re.search(r"\d", text):
        whole, _, fraction = text.replace(",", "").lstrip("+").partition(".")
        sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
        fraction = fraction.rstrip("0")
        digits = digits.lstrip("0") or "0"
        text = f"{sign}{digits}.{fraction}" if fraction else f"{sign}{digits}"
        return "0" if text == "-0" else text
    return text


_AROUND = " *_`$€£¥\"'“”‘’"  # on either side of an answer it says nothing
_BRACKETS = {"(": ")", "[": "]", "\\(": "\\)", "\\[": "\\]"}


def _bare(text: str) -> str:
    """Return `text` without what surrounds an answer, layer by layer."""
    before = None
    while text != before:
        before = text
        text = text.replace("\\$", "$").lstrip(_AROUND).rstrip(_AROUND + ".")
        for opening, closing in _BRACKETS.items():
            inside = text[len(opening) : -len(closing)]
            # A pair or an interval keeps its brackets: (1, 200) is not 1200.
            if text.startswith(opening) and text.endswith(closing) and not set(inside) & set("()[],"):
                text = inside
        text = re.sub(r"^([+-])[$€£¥](?=[\d.])", r"\1", text)  # -$12
        text = re.sub(r"^([a-z])[).:]$", r"\1", text)  # b)
    return text
