"""The formats of training files, as a table: which columns each needs, and what a row of it means.

The first that fits is taken, so the more specific stand first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepladder.data.files import readers
from stepladder.data.files.readers import ANSWERS, CONVERSATION, MARGINS, PROMPT, RANKED, RANKS, SCORES
from stepladder.data.files.records import Kind, Record
from stepladder.data.files.row import SHARED_COLUMNS, Row, present

Columns: TypeAlias = tuple[tuple[str, ...], ...]  # of each inner tuple the first that is there is read

NOUNS: Mapping[Kind, str] = {
    "demonstration": "conversation",
    "text": "text",
    "preference": "preference",
    "unpaired": "completion with a label",
    "ranking": "ranking",
    "steps": "solution in steps",
}


def noun(kind: Kind, count: int = 2) -> str:
    """What records of a kind are called.

    >>> noun("unpaired")
    'completions with a label'
    """
    head, space, rest = NOUNS[kind].partition(" ")
    return NOUNS[kind] if count == 1 else f"{head}s{space}{rest}"


@dataclass(frozen=True, slots=True)
class Format:
    """`needs`: one of each tuple of columns must hold something; `uses`: those that may be there too."""

    name: str
    kind: Kind
    needs: Columns
    read: Callable[[Row], Record]
    example: str
    uses: Columns = SHARED_COLUMNS
    fits_values: Callable[[Mapping[str, Any]], bool] | None = None

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Has this row the columns?"""
        return all(any(present(row.get(n)) for n in names) for names in self.needs) and (
            self.fits_values is None or self.fits_values(row)
        )

    def read_columns(self, row: Mapping[str, Any]) -> set[str]:
        """The columns of this row that are read."""
        found = (next((n for n in names if present(row.get(n))), None) for names in (*self.needs, *self.uses))
        return {name for name in found if name is not None}


FORMATS = (
    Format(
        "step labels",
        "steps",
        (PROMPT, ("completions", "steps"), ("labels",)),
        readers.steps,
        '{"prompt": ..., "completions": ["step 1", ...], "labels": [true, ...]}',
    ),
    Format(
        "steps without labels",
        "steps",
        (PROMPT, ("steps",)),
        readers.steps,
        '{"prompt": ..., "steps": ["step 1", ...]}',
    ),
    Format(
        "ranked completions",
        "ranking",
        (PROMPT, RANKED, (*RANKS, *SCORES)),
        readers.ranking,
        '{"prompt": ..., "completions": [...], "scores": [...]}',
    ),
    Format(
        "ranked objects",
        "ranking",
        (PROMPT, RANKED),
        readers.ranking,
        '{"prompt": ..., "completions": [{"response": ..., "score": ...}, ...]}',
        fits_values=readers.items_are_ranked,
    ),
    Format(
        "completions best first",
        "ranking",
        (PROMPT, RANKED),
        readers.ranking,
        '{"prompt": ..., "responses": ["the best", ...]}',
    ),
    Format(
        "completions as steps",
        "steps",
        (PROMPT, ("completions",)),
        readers.steps,
        '{"prompt": ..., "completions": ["step 1", ...]}',
    ),
    Format(
        "chosen and rejected",
        "preference",
        (("chosen",), ("rejected",)),
        readers.preference,
        '{"prompt": ..., "chosen": ..., "rejected": ...}',
        uses=(PROMPT, ("margin",), *((name,) for pair in MARGINS for name in pair), *SHARED_COLUMNS),
    ),
    Format(
        "completion and label",
        "unpaired",
        (("completion", "response"), ("label",)),
        readers.unpaired,
        '{"prompt": ..., "completion": ..., "label": true}',
        uses=(PROMPT, *SHARED_COLUMNS),
    ),
    Format("conversation", "demonstration", (CONVERSATION,), readers.conversation, '{"messages": [...]}'),
    Format(
        "prompt and completion",
        "demonstration",
        (PROMPT, ANSWERS),
        readers.prompt_completion,
        '{"prompt": ..., "completion": ...}',
        uses=(("input",), *SHARED_COLUMNS),
    ),
    Format("text", "text", (("text",),), readers.text, '{"text": ...}', uses=()),
)
AMBIGUOUS = ("completions best first", "completions as steps")  # the same columns, two meanings
