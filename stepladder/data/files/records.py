"""What a row of a training file means, whatever columns it came in: plain records, no tokens.

    Demonstration   a conversation to imitate           Preference   one answer better than another
    Text            plain text to model                 Unpaired     an answer with a thumb up or down
    Ranking         K answers, best first               Steps        a solution with a label for each step

Prompts are messages; a completion is the messages that follow it (nearly always one of the assistant).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepladder.types import Message, Tool

Kind: TypeAlias = Literal["demonstration", "text", "preference", "unpaired", "ranking", "steps"]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to imitate, with the tools it was held with.

    Where the file gave a prompt and its completion, `answers_from` is where the completion begins in
    `messages`; it may itself hold several turns. In a plain conversation it is 0, and all assistant turns are
    answers.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    answers_from: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, every token of it to be modelled."""

    text: str


@dataclass(frozen=True, slots=True)
class Preference:
    """`chosen` is better than `rejected` as a continuation of `prompt`; `margin` says by how much, if known.

    Example: prompt (Message("user", "2+2?"),), chosen (Message("assistant", "4"),), rejected
    (Message("assistant", "5"),).
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A completion that was liked (`label=True`) or not."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    label: bool
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranking:
    """K completions of one prompt, the best first.

    `ranks[k]` is the place of completion k, equal where two are equally good; empty where all differ.
    `scores[k]` is what the file scored it, higher is better; empty where only the order is known.
    """

    prompt: tuple[Message, ...]
    completions: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    ranks: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """A solution in steps; `labels[i]` is the probability (0 or 1 where it is certain) that step i is right.

    `labels` is empty where they are still to be found, by Monte Carlo rollouts from each prefix.
    """

    prompt: tuple[Message, ...]
    steps: tuple[str, ...]
    labels: tuple[float, ...] = ()


Record: TypeAlias = Demonstration | Text | Preference | Unpaired | Ranking | Steps


def both_sides(pair: Preference) -> tuple[Unpaired, Unpaired]:
    """A pair as two single answers, for KTO."""
    return (
        Unpaired(pair.prompt, pair.chosen, True, pair.tools),
        Unpaired(pair.prompt, pair.rejected, False, pair.tools),
    )
