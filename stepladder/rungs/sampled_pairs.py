"""Pairs of an earlier rung in the tokens they were sampled in.

`pairs.jsonl` holds them as text, for any trainer. Text that is encoded again may come out in other tokens
than the policy said it in, and then another sequence is preferred than the one that was judged; so the rung
keeps the episodes beside it, and preference optimisation in the same run takes their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepladder.data.budget import Budget
from stepladder.data.files.records import Preference, Unpaired
from stepladder.data.files.split import fingerprint_of
from stepladder.reports.run import read_jsonl
from stepladder.run.records import trajectory_from_dict
from stepladder.types import TrainingSample

SAMPLED = "pairs"  # trajectories/pairs.jsonl: the better and the worse episode of each row of pairs.jsonl
Sampled = Mapping[str, tuple[TrainingSample, ...]]  # by the fingerprint of a row


def sampled_pairs(folder: Path, rows: Sequence[Preference | Unpaired]) -> Sampled:
    """Row -> its sampled sides, of the rows of `pairs.jsonl` in its order: pairs, or the sides in turn.

    Rows are missing whose sides do not continue one prompt in one sample each, as where a template rewrites
    earlier turns; and all of them where a run of an earlier version kept no episodes.
    """
    path = folder / "trajectories" / f"{SAMPLED}.jsonl"
    lines = read_jsonl(path) if path.is_file() else []
    episodes = [trajectory_from_dict({k: v for k, v in line.items() if k != "step"}) for line in lines]
    sides = len(rows) if rows and isinstance(rows[0], Unpaired) else 2 * len(rows)
    if len(episodes) != sides:
        return {}
    out: dict[str, tuple[TrainingSample, ...]] = {}
    for i in range(0, len(episodes), 2):
        pair = [t.samples[0] for t in episodes[i : i + 2] if len(t.samples) == 1]
        if len(pair) < 2 or _prompt(pair[0]) != _prompt(pair[1]):
            continue
        if sides == len(rows):
            out |= {fingerprint_of([rows[i + k]]): (side,) for k, side in enumerate(pair)}
        else:
            out[fingerprint_of([rows[i // 2]])] = tuple(pair)
    return out


def sampled_row(
    sampled: Sampled, row: Preference | Unpaired, key: str, budget: Budget
) -> tuple[TrainingSample, ...] | None:
    """The sides of a row as they were sampled, of group `key`; None where they are unknown, equal or over the
    budget, and the text is to be taken."""
    sides = sampled.get(fingerprint_of([row]), ()) if sampled else ()
    if not sides or any(_over(side, budget) for side in sides):
        return None
    if len({side.token_ids for side in sides}) < len(sides):
        return None
    names = ("/chosen", "/rejected") if len(sides) == 2 else ("",)
    return tuple(
        replace(side, trajectory_id=key + name, group_id=key) for side, name in zip(sides, names, strict=True)
    )


def _prompt(sample: TrainingSample) -> tuple[int, ...]:
    return sample.token_ids[: sample.mask.index(True)]


def _over(sample: TrainingSample, budget: Budget) -> bool:
    prompt = len(_prompt(sample))
    completion = len(sample.token_ids) - prompt
    limits = ((prompt, budget.max_prompt_tokens), (completion, budget.max_completion_tokens))
    return any(limit is not None and length > limit for length, limit in limits)
