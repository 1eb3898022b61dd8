"""How long a prompt and a completion may be, what happens to longer ones, and how many were touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from stepladder.errors import ConfigError
from stepladder.types import TrainingSample


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens each side may have; None is no limit. A side never pays for the other, and none is emptied.

    keep="end" cuts a prompt at its start, keep="start" at its end; what opens the assistant's turn and a
    leading BOS stay. overlong="drop" drops the row instead. A completion loses its end, with the terminator.

    Raises `ConfigError` for limits below 1 and for settings that would change nothing.
    """

    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    keep: Literal["end", "start"] = "end"
    overlong: Literal["cut", "drop"] = "cut"

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}. A usual value is 512")
        if self.keep == "start" and (self.max_prompt_tokens is None or self.overlong == "drop"):
            raise ConfigError(
                'keep="start" says how prompts are cut, but none is; set max_prompt_tokens and '
                'overlong="cut", or leave keep out'
            )
        if self.overlong == "drop" and self.max_prompt_tokens is None and self.max_completion_tokens is None:
            raise ConfigError(
                'overlong="drop" drops nothing without a limit; set max_prompt_tokens or '
                "max_completion_tokens, for example 512"
            )


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that gives no sample, and why. `tokens` is the length that was too much, where it was that."""

    reason: str
    trajectory_id: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A sample within its budget, and how many tokens each side lost."""

    sample: TrainingSample
    prompt_lost: int = 0
    completion_lost: int = 0


@dataclass(slots=True)
class Tally:
    """Rows kept, cut and dropped; `text` says so in one line."""

    kept: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0
    split_texts: int = 0
    left_out: int = 0  # samples of rows that were kept: of several, those beyond the limit
    lost_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def keep(self, parts: Sequence[Fitted], left_out: int = 0) -> None:
        """A row that gave these samples, which share its prompt; `left_out` more had nothing to learn."""
        self.kept += 1
        self.left_out += left_out
        self.cut_prompts += any(p.prompt_lost for p in parts)
        self.cut_completions += sum(bool(p.completion_lost) for p in parts)
        self.lost_tokens += max(p.prompt_lost for p in parts) + sum(p.completion_lost for p in parts)

    def drop(self, row: Dropped) -> None:
        """A row that gave none."""
        self.dropped[row.reason] += 1

    @property
    def rows(self) -> int:
        return self.kept + sum(self.dropped.values())

    @property
    def text(self) -> str:
        """One line for people.

        >>> Tally(kept=8, cut_prompts=1, lost_tokens=30, dropped=Counter({"too long": 2})).text
        '10 rows: 8 kept, 1 prompt cut (30 tokens lost), 2 dropped (too long: 2)'
        """
        parts = [f"{self.kept:,} kept"]
        if self.cut_prompts:
            parts.append(f"{self.cut_prompts:,} prompt{'s' * (self.cut_prompts > 1)} cut")
        if self.cut_completions:
            plural = "s" * (self.cut_completions > 1)
            parts.append(f"{self.cut_completions:,} completion{plural} cut, without a terminator")
        if self.split_texts:
            parts.append(f"{self.split_texts:,} text{'s' * (self.split_texts > 1)} split")
        if self.lost_tokens:
            parts[-1] += f" ({self.lost_tokens:,} tokens lost)"
        if self.left_out:
            plural = "s" * (self.left_out > 1)
            parts.append(f"{self.left_out:,} answer{plural} beyond the limit left out")
        if self.dropped:
            why = "; ".join(f"{reason}: {n:,}" for reason, n in sorted(self.dropped.items()))
            parts.append(f"{sum(self.dropped.values()):,} dropped ({why})")
        return f"{self.rows:,} row{'s' * (self.rows != 1)}: {', '.join(parts)}"


def limit_tokens(
    samples: Sequence[TrainingSample], max_tokens: int, overlong: Literal["cut", "drop"]
) -> list[Fitted] | Dropped:
    """The samples of one row within `max_tokens` each: cut at their end, or the row is dropped.

    Of a row that the chat template makes several samples of, those without a trained token within the limit
    are missing: `Tally.keep` is told how many.
    """
    longest = max(len(s.token_ids) for s in samples)
    key = samples[0].trajectory_id
    if longest > max_tokens and overlong == "drop":
        return Dropped(f"over max_tokens={max_tokens}", key, longest)
    if longest > max_tokens and any(s.images for s in samples):
        return Dropped(f"over max_tokens={max_tokens}, with images", key, longest)
    fitted = []
    for sample in samples:
        lost = max(len(sample.token_ids) - max_tokens, 0)
        if any(sample.mask[:max_tokens]):
            short = sample if not lost else _taken(sample, range(max_tokens))
            fitted.append(Fitted(short, completion_lost=lost))
    return fitted or Dropped(f"nothing to learn within max_tokens={max_tokens}", key, longest)


def cut_to_budget(
    sample: TrainingSample, prompt_length: int, budget: Budget, frame: Callable[[], tuple[int, int] | None]
) -> Fitted | Dropped:
    """`sample`, whose first `prompt_length` tokens are the prompt, within `budget`.

    `frame()` is asked when a prompt must be cut: how many of its first and last tokens always stay.
    """
    prompt, total = prompt_length, len(sample.token_ids)
    over_prompt = 0 if budget.max_prompt_tokens is None else max(prompt - budget.max_prompt_tokens, 0)
    limit = budget.max_completion_tokens
    over_completion = 0 if limit is None else max(total - prompt - limit, 0)
    if budget.overlong == "drop" and (over_prompt or over_completion):
        which = "max_prompt_tokens" if over_prompt else "max_completion_tokens"
        tokens = prompt if over_prompt else total - prompt
        return Dropped(f"over {which}={getattr(budget, which)}", sample.trajectory_id, tokens)
    keep = list(range(total))
    if over_completion:
        end = total - over_completion
        while not sample.mask[end - 1]:  # a completion begins with a trained token, so this ends
            end -= 1
        over_completion = total - end
        keep = keep[:end]
    if over_prompt:
        if sample.images:
            return Dropped("a prompt with images cannot be cut", sample.trajectory_id, prompt)
        kept_prompt = _kept_prompt(prompt, budget, frame())
        if kept_prompt is None:
            return Dropped("what opens the assistant's turn is not apart", sample.trajectory_id, prompt)
        keep = [*kept_prompt, *keep[prompt:]]
    if not over_prompt and not over_completion:
        return Fitted(sample)
    return Fitted(_taken(sample, keep), over_prompt, over_completion)


def _kept_prompt(prompt: int, budget: Budget, frame: tuple[int, int] | None) -> list[int] | None:
    """Indices of the prompt's tokens that stay."""
    limit = budget.max_prompt_tokens
    assert limit is not None
    if frame is None:
        return None
    head, tail = frame
    if limit <= head + tail:
        raise ConfigError(
            f"max_prompt_tokens={limit} leaves no room for the prompt beside its frame of {head + tail} "
            f"tokens (what begins it and what opens the assistant's turn); give at least {head + tail + 1}"
        )
    if budget.keep == "start":
        return [*range(limit - tail), *range(prompt - tail, prompt)]
    return [*range(head), *range(prompt - limit + head, prompt)]


def _taken(sample: TrainingSample, keep: Sequence[int]) -> TrainingSample:
    return replace(
        sample,
        token_ids=tuple(sample.token_ids[i] for i in keep),
        mask=tuple(sample.mask[i] for i in keep),
        behaviour_logprobs=tuple(sample.behaviour_logprobs[i] for i in keep),
        turn_ids=tuple(sample.turn_ids[i] for i in keep),
    )
