"""Records as token ids: prompt and completion encoded apart, each cut to its own budget, every loss counted.

    prompt (mask False) | completion with its terminator (mask True)

The two sides of a pair have the same prompt ids, since a prompt is encoded without looking at its completion,
and one `group_id`, so that `batching.pack` computes the prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepladder.data.budget import Budget, Dropped, Fitted, Tally, cut_to_budget
from stepladder.data.encoder import Encoder, Side
from stepladder.data.files.records import Preference, Ranking, Steps, Unpaired
from stepladder.errors import DataError, TemplateError
from stepladder.types import Message, Tool, TrainingSample

WHOLE = Budget()


@dataclass(frozen=True, slots=True)
class StepSample:
    """A solution for a process reward model: `ends[i]` is the index of the last token of step i.

    A solution that was cut has only the steps that are whole, and their labels.
    """

    sample: TrainingSample
    ends: tuple[int, ...]
    labels: tuple[float, ...]


def completion_samples(
    renderer: Encoder,
    prompt: Side,
    completion: Side,
    tools: Sequence[Tool] = (),
    *,
    trajectory_id: str,
    group_id: str,
    budget: Budget = WHOLE,
    tally: Tally | None = None,
) -> TrainingSample | Dropped:
    """One sample: the mask is True on what the assistant says in `completion`, its terminator included.

    Messages go through the chat template; strings do not (one BOS, the end-of-sequence token at the end). A
    cut completion loses its terminator: it teaches no early end. `tally` counts what was cut or dropped.
    Raises `TemplateError` where the template cannot render the messages, `DataError` for an empty prompt.
    """
    fitted = _fit(renderer, prompt, completion, tools, trajectory_id, group_id, budget)
    if isinstance(fitted, Dropped):
        return _counted(tally, fitted)
    _count(tally, fitted)
    return fitted.sample


def preference_samples(
    renderer: Encoder,
    record: Preference,
    *,
    group_id: str,
    budget: Budget = WHOLE,
    tally: Tally | None = None,
) -> tuple[TrainingSample, TrainingSample] | Dropped:
    """(chosen, rejected): trajectories GROUP/chosen and GROUP/rejected. Dropped together or not at all."""
    sides = (("chosen", record.chosen), ("rejected", record.rejected))
    fitted = [
        _fit(renderer, record.prompt, side, record.tools, f"{group_id}/{name}", group_id, budget)
        for name, side in sides
    ]
    kept = [f for f in fitted if isinstance(f, Fitted)]
    if len(kept) < 2:
        return _counted(tally, next(f for f in fitted if isinstance(f, Dropped)))
    chosen, rejected = (f.sample for f in kept)
    if chosen.token_ids == rejected.token_ids:
        cut = " once cut" if any(f.completion_lost for f in kept) else ""
        return _counted(tally, Dropped(f"chosen equals rejected{cut}", group_id))
    _count(tally, *kept)
    return chosen, rejected


def unpaired_samples(
    renderer: Encoder,
    record: Unpaired,
    *,
    group_id: str,
    budget: Budget = WHOLE,
    tally: Tally | None = None,
) -> TrainingSample | Dropped:
    """The sample of a completion with a label: trajectory GROUP."""
    return completion_samples(
        renderer,
        record.prompt,
        record.completion,
        record.tools,
        trajectory_id=group_id,
        group_id=group_id,
        budget=budget,
        tally=tally,
    )


def ranking_samples(
    renderer: Encoder,
    record: Ranking,
    *,
    group_id: str,
    budget: Budget = WHOLE,
    tally: Tally | None = None,
) -> tuple[TrainingSample, ...] | Dropped:
    """A sample a completion, the best first: trajectories GROUP/0, GROUP/1, ... All are dropped if one is."""
    kept = []
    for k, completion in enumerate(record.completions):
        fitted = _fit(renderer, record.prompt, completion, record.tools, f"{group_id}/{k}", group_id, budget)
        if isinstance(fitted, Dropped):
            return _counted(tally, fitted)
        kept.append(fitted)
    _count(tally, *kept)
    return tuple(f.sample for f in kept)


def step_samples(
    renderer: Encoder,
    record: Steps,
    *,
    group_id: str,
    budget: Budget = WHOLE,
    separator: str = "\n",
    tally: Tally | None = None,
) -> StepSample | Dropped:
    """The solution with `separator` after each step but the last, and where each step ends.

    Steps are encoded apart, so that a step's end is a token's end; white space around them is left out. The
    last token of a step is that of its separator, of the last one that of its text (before the terminator).
    """
    steps = [step.strip() for step in record.steps]
    prompt_ids, pieces = _step_pieces(renderer, record.prompt, steps, separator)
    ids, ends = list(prompt_ids), []
    for i, piece in enumerate(pieces):
        ids += renderer.encode(piece, after=ids[-1])
        if i < len(steps):
            ends.append(len(ids) - 1)
    n = len(prompt_ids)
    whole = TrainingSample(
        tuple(ids),
        (False,) * n + (True,) * (len(ids) - n),
        (0.0,) * len(ids),
        group_id,
        (-1,) * n + (0,) * (len(ids) - n),
        group_id,
    )
    fitted = cut_to_budget(whole, n, budget, lambda: renderer.frame(record.prompt, (), prompt_ids))
    if isinstance(fitted, Dropped):
        return _counted(tally, fitted)
    shift = fitted.prompt_lost
    placed = tuple(end - shift for end in ends if end - shift < len(fitted.sample.token_ids))
    if not placed:
        none = Dropped("no step is whole within max_completion_tokens", group_id, len(ids) - n)
        return _counted(tally, none)
    _count(tally, fitted)
    return StepSample(fitted.sample, placed, record.labels[: len(placed)])


def text_samples(
    renderer: Encoder,
    text: str,
    *,
    trajectory_id: str,
    group_id: str,
    max_tokens: int | None = None,
    tally: Tally | None = None,
) -> tuple[TrainingSample, ...]:
    """Plain text with its end-of-sequence token, every token trained but the first, which nothing precedes.

    A longer text is cut into samples of at most `max_tokens` (2 or more); each begins with the last token of
    the one before, so that every token is trained once.
    """
    if max_tokens is not None and max_tokens < 2:
        raise DataError(f"max_tokens={max_tokens} leaves no token to train; give at least 2")
    ids = renderer.whole_text(text)
    size = max_tokens or max(len(ids), 2)
    out = []
    for start in range(0, max(len(ids) - 1, 1), size - 1):
        piece = tuple(ids[start : start + size])
        mask = (False, *[True] * (len(piece) - 1))
        turn_ids = (-1,) * len(piece)
        out.append(TrainingSample(piece, mask, (0.0,) * len(piece), trajectory_id, turn_ids, group_id))
    if tally is not None:
        tally.kept += 1
        tally.split_texts += len(out) > 1
    return tuple(out)


# -- one side ---------------------------------------------------------------------------------------------


def _fit(
    renderer: Encoder,
    prompt: Side,
    completion: Side,
    tools: Sequence[Tool],
    trajectory_id: str,
    group_id: str,
    budget: Budget,
) -> Fitted | Dropped:
    sample = renderer.completed(prompt, completion, tools, trajectory_id=trajectory_id, group_id=group_id)
    if sample is None:
        return Dropped("the chat template rewrites earlier turns of the completion", trajectory_id)
    n = sample.mask.index(True)
    return cut_to_budget(sample, n, budget, lambda: renderer.frame(prompt, tools, sample.token_ids[:n]))


def _step_pieces(
    renderer: Encoder, prompt: Sequence[Message], steps: Sequence[str], separator: str
) -> tuple[tuple[int, ...], list[str]]:
    """(prompt ids, shielded text of each step, then the terminator)."""
    ids, text, end = renderer.answered(prompt, separator.join(steps))
    pieces, begin, at = [], 0, 0
    for i, step in enumerate(steps):
        shielded = renderer.shield(step)
        found = text.find(shielded, at)
        if found < 0:
            raise TemplateError(
                f"the chat template changes step {i} of a solution, so its end cannot be found: {step[:80]!r}"
            )
        at = found + len(shielded)
        if i < len(steps) - 1 and text.startswith(separator, at):
            at += len(separator)
        pieces.append(text[begin:at])
        begin = at
    return ids, [*pieces, text[begin:] + end]


def _count(tally: Tally | None, *kept: Fitted) -> None:
    if tally is not None:
        tally.keep(kept)


def _counted(tally: Tally | None, dropped: Dropped) -> Dropped:
    if tally is not None:
        tally.drop(dropped)
    return dropped
