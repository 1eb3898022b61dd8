"""Samples as coloured text: who wrote each token, and what training does with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from stepladder.data.encoder import Encoder
from stepladder.rungs.preview import Shown
from stepladder.types import Message, TrainingSample

LEGEND = (
    ("template", "dim"),
    ("prompt", "cyan"),
    ("environment and tools", "magenta"),
    ("trained, imitated or advantage > 0", "green"),
    ("trained, advantage < 0", "red"),
    ("sampled, advantage 0", "yellow"),
    ("not trained, said by an assistant", "blue"),
)


def shown(
    renderer: Encoder,
    sample: TrainingSample,
    title: str,
    advantage: float,
    messages: Sequence[Message],
    *,
    turns: int | None = None,
) -> Shown:
    """Return a sample that is imitated, pushed up or pushed down by the sign of `advantage`.

    Of the assistant messages the last `turns` are the policy's; all of them where that is None.
    """
    if turns is None:
        turns = sum(m.role == "assistant" for m in messages)
    detail = f"{sample.num_trained} of {len(sample.token_ids)} tokens trained"
    return Shown(title, detail, coloured(renderer, sample, advantage, messages, turns=turns))


def coloured(
    renderer: Encoder, sample: TrainingSample, advantage: float, messages: Sequence[Message], *, turns: int
) -> Text:
    """Return the sample's tokens, joined, in the colours of `LEGEND`.

    Trained context (`train = "full"`) is underlined.

    What the policy wrote, and what is trained, is read from the sample. Who wrote the rest is found by
    looking for the texts of `messages`, whose last `turns` assistant messages are the policy's turns; what
    is not found is shown as the template's. That is for the eye only.
    """
    signal = "green" if advantage > 0 else "red" if advantage < 0 else "yellow"
    said = [i for i, m in enumerate(messages) if m.role == "assistant"]
    said = [*said[max(len(said) - turns, 0) :], len(messages)]
    text, at = Text(), 0
    for start, end in _stretches(list(zip(sample.mask, sample.turn_ids, strict=True))):
        piece = renderer.decode(sample.token_ids[start:end])
        trained, turn = sample.mask[start], sample.turn_ids[start]
        if turn >= 0:
            text.append(piece, signal if trained else "blue")
            at = said[min(turn, len(said) - 1)] + 1
            continue
        following = next((t for t in sample.turn_ids[end:] if t >= 0), len(said))
        until = said[min(following, len(said) - 1)]
        authors = [(m.text, _author(m, at + k < said[0])) for k, m in enumerate(messages[at:until])]
        for part, style in _placed(piece, authors):
            text.append(part, f"{style} underline" if trained else style)
    return text


def _author(message: Message, opening: bool) -> str:
    if message.role == "assistant":
        return "blue"
    return "cyan" if opening and message.role != "tool" else "magenta"


def _placed(piece: str, authors: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return `piece` cut at the texts that are found in it, one after the other; the rest is dim.

    >>> _placed("<u>hi</u>", [("hi ", "cyan"), ("gone", "magenta")])
    [('<u>', 'dim'), ('hi', 'cyan'), ('</u>', 'dim')]
    """
    out, at = [], 0
    for words, style in authors:
        found = piece.find(words.strip(), at)
        if found >= 0 and words.strip():
            out += [(piece[at:found], "dim"), (words.strip(), style)]
            at = found + len(words.strip())
    return [(part, style) for part, style in [*out, (piece[at:], "dim")] if part]


def _stretches(mask: Sequence[object]) -> list[tuple[int, int]]:
    """Return the maximal stretches of equal values.

    >>> _stretches((False, False, True))
    [(0, 2), (2, 3)]
    """
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
