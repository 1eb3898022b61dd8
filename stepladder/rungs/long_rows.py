"""Rows longer than the model has positions for, refused before anything is trained.

With learned positions the model would stop in the middle of a run; with rotary ones it would train on
distances that it never saw, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepladder.data.positions import max_positions
from stepladder.errors import DataError
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample

Rows = Iterable[Iterable[TrainingSample]]  # the samples of each row


def refuse_overlong(policy: Policy, rows: Rows, remedy: str) -> None:
    """Raise DataError where the samples of a row are too long; `remedy` ends the sentence, with {limit}."""
    limit = max_positions(policy.lm)
    if limit is None:
        return
    longest = [max((len(sample.token_ids) for sample in row), default=0) for row in rows]
    over = [length for length in longest if length > limit]
    if over:
        raise DataError(
            f"{len(over):,} of {len(longest):,} rows are longer than the {limit:,} tokens that the model has "
            f"positions for (max_position_embeddings in its config.json), the longest {max(over):,} tokens; "
            + remedy.format(limit=limit)
        )


def too_long(section: str) -> str:
    """The remedy of a section whose sides have their own limits."""
    return (
        f"cut or drop them: {section}.max_prompt_tokens and {section}.max_completion_tokens that add up to "
        "at most {limit}"
    )
