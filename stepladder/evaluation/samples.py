"""Several episodes of each held-out task, and what counts of them: solved, the answer given, a score."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepladder.rewards.reward import Reward, final_answer, score_group
from stepladder.types import Group, Trajectory

Answer = Callable[[Trajectory], str | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode. `answer` None: it gave none (failed, cut off), so no vote. `score` None: not scored."""

    solved: bool
    answer: str | None = None
    score: float | None = None
    tokens: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """The episodes of one task, in the order they were asked for; failed ones are in it, as unsolved."""

    task: str
    domain: str
    samples: tuple[Sample, ...]

    @property
    def solved(self) -> int:
        return sum(sample.solved for sample in self.samples)


async def read_samples(
    groups: Sequence[Group], *, answer: Answer | None = None, reward: Reward | None = None
) -> list[TaskSamples]:
    """Groups as numbers. `reward` gives the score that best-of-n and weighted votes go by.

    Success is the environment's alone; the reward is not added to it.
    """
    read = answer or answer_of
    out = []
    for group in groups:
        scored = None if reward is None else await score_group(group, [reward], environment_weight=0.0)
        out.append(
            TaskSamples(
                group.task.id,
                group.task.domain,
                tuple(
                    Sample(
                        t.solved,
                        None if t.failure is not None or t.truncated else read(t),
                        None if scored is None else scored.trajectories[i].score.value,
                        t.num_sampled_tokens,
                        t.failure is not None,
                    )
                    for i, t in enumerate(group.trajectories)
                ),
            )
        )
    return out


def answer_of(trajectory: Trajectory) -> str | None:
    """What an episode answered, so that equal answers are equal texts; None for an empty one.

    `info["answer"]` where the environment gives it; else what stands after the last "answer:" or in the last
    boxed{} (without braces inside) of the last message, else all of it, as `canonical` writes it.
    """
    if "answer" in trajectory.info:
        return str(trajectory.info["answer"])
    return canonical(final_answer(trajectory))


def canonical(text: str) -> str | None:
    """The answer inside a text, in lower case, without what only surrounds it: white space, a full stop,
    marks of emphasis, quotes, a currency's sign, brackets around the whole, the bracket or stop after the
    letter of a choice. Numbers are without commas and needless zeros. Units and words stay.

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
    """Without what surrounds an answer, layer by layer."""
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
