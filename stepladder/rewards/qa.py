"""Answers of question answering: exact match and token F1 after the usual normalisation.

Source: the SQuAD evaluation (Rajpurkar et al. 2016, arXiv:1606.05250), as Search-R1 (arXiv:2503.09516) and
others use it for search agents.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Lower case, without ASCII punctuation, without a/an/the, spaces squeezed; in this order.

    >>> normalised("An  apple, a day!"), normalised("19-82"), normalised("the")
    ('apple day', '1982', '')
    """
    text = answer.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, gold: str | Sequence[str]) -> float:
    """1.0 where the normalised answer is one of the gold answers, else 0.0.

    >>> exact_match("In 1982.", "1982"), exact_match("1982.", ["1983", "1982"])
    (0.0, 1.0)
    """
    return float(any(normalised(answer) == normalised(alias) for alias in _aliases(gold)))


def token_f1(answer: str, gold: str | Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised tokens, the best over the gold answers.

    Two empty answers agree (1.0); an empty one and a full one do not.

    >>> round(token_f1("in 1982", "1982"), 4)
    0.6667
    """
    return max(_f1(normalised(answer).split(), normalised(alias).split()) for alias in _aliases(gold))


def _aliases(gold: str | Sequence[str]) -> Sequence[str]:
    aliases = [gold] if isinstance(gold, str) else list(gold)
    if not aliases:
        raise ValueError("a question needs at least one gold answer; got none")
    return aliases


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = sum((Counter(answer) & Counter(gold)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(answer), shared / len(gold)
    return 2 * precision * recall / (precision + recall)
