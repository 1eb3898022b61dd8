"""Preferences as samples: from a file, made by the environment, or written by an earlier rung of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepladder.data.budget import Budget, Dropped, Tally
from stepladder.data.files.datasets import read_dataset
from stepladder.data.files.records import Preference, Unpaired, both_sides
from stepladder.data.files.split import fingerprint_of, repeated, split_by_content
from stepladder.data.samples import preference_samples, unpaired_samples
from stepladder.errors import DataError
from stepladder.recipe.preference import EARLIER_RUNG, PreferenceSection
from stepladder.run.training_files import PAIRS
from stepladder.rungs.epochs import shuffled, shuffled_batches
from stepladder.rungs.long_rows import refuse_overlong, too_long
from stepladder.rungs.preference.reference_logprobs import ReferenceLog
from stepladder.rungs.preference.update import Answer, Judged, Pair
from stepladder.rungs.row_errors import naming
from stepladder.rungs.sampled_pairs import Sampled, sampled_pairs, sampled_row
from stepladder.types import TrainingSample
from stepladder.workbench.bench import Workbench

Row = Preference | Unpaired
NONE: Sampled = {}


@dataclass(frozen=True, slots=True)
class PairData:
    """What DPO and its relatives train on and validate with."""

    train: list[Pair]
    held: list[Pair]

    def batches(self, epoch: int, size: int, *, seed: int) -> list[list[int]]:
        """All rows in an order of the epoch's own."""
        return shuffled_batches(len(self.train), size, f"{seed}/{epoch}")


@dataclass(frozen=True, slots=True)
class JudgedData:
    """What KTO trains on and validates with. Its batches are the same in all epochs, their order is not."""

    train: list[Judged]
    held: list[Judged]
    fixed: list[list[int]]

    def batches(self, epoch: int, size: int, *, seed: int) -> list[list[int]]:
        return shuffled(self.fixed, f"{seed}/{epoch}")


def preference_rows(
    bench: Workbench,
    settings: PreferenceSection,
    folder: Path,
    *,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    found: dict[str, tuple[TrainingSample, ...]] | None = None,
) -> tuple[list[Row], list[Row]]:
    """(training, validation) records, with no prompt in common; single answers for KTO, else pairs.

    `say` is told what the file was taken for, and how many of its rows were repetitions. `found` is given
    the sampled tokens of the rows that an earlier rung of the run wrote.
    """
    rows: list[Row]
    if settings.data is None:
        pairs = bench.sources.once(bench.world.preferences, settings.pairs, seed)
        rows = [side for pair in pairs for side in both_sides(pair)] if settings.loss == "kto" else [*pairs]
        tools = bench.runner.run(bench.world.opening()).tools
        rows = [row if row.tools else replace(row, tools=tools) for row in rows]
    else:
        path = folder / PAIRS if settings.data == EARLIER_RUNG else Path(settings.data)
        if settings.data == EARLIER_RUNG:
            dataset = read_dataset(path, kind=settings.kind)
        else:
            dataset = bench.sources.once(read_dataset, path, settings.kind)
        rows = list(dataset.records)
        say(dataset.description)
        if found is not None and settings.data == EARLIER_RUNG:
            found |= sampled_pairs(folder, rows)
            known = sum(fingerprint_of([row]) in found for row in rows)
            say(f"{known} of {len(rows)} in the tokens they were sampled in")
    if not settings.validation:
        return rows, []
    train, held = split_by_content(rows, settings.validation, seed)
    if again := repeated(len(rows) - len(train) - len(held)):
        say(again)
    return train, held


# -- single answers: whom each is compared with -------------------------------------------------------------


def fixed_batches(count: int, size: int, *, seed: int) -> list[list[int]]:
    """Rows in random batches that are drawn once. A last batch of one row, which has no other to be compared
    with, joins the one before.

    Fixed, because the reference's log-probability of each mismatched answer is logged before training.
    """
    batches = shuffled_batches(count, size, f"{seed}/batches")
    if len(batches) > 1 and len(batches[-1]) == 1:
        last = batches.pop()
        batches[-1] += last
    return batches


def of_several_prompts(batches: Sequence[list[int]], prompts: Sequence[str]) -> list[list[int]]:
    """The batches, those whose rows happen to have one prompt joined to their neighbours.

    >>> of_several_prompts([[0, 2], [1, 3]], ["a", "a", "b", "a"])
    [[0, 2, 1, 3]]
    """
    out: list[list[int]] = []
    for batch in batches:
        alone = any(len({prompts[i] for i in rows}) < 2 for rows in (batch, *out[-1:]))
        if out and alone:
            out[-1] = [*out[-1], *batch]
        else:
            out.append(batch)
    return out


def mismatched_rows(prompts: Sequence[object]) -> list[int]:
    """For each row of a batch another, whose answer follows its prompt: no answer twice, no true pair.

    Rows of one prompt stand together, and all move on by as many as the largest of these sets has. With
    prompts that all differ this is `objectives.kto.mismatched_answers`: i - 1, rolled. Where one prompt has
    more than half of the batch, its rows take the others' answers in turn.
    Raises DataError where all prompts are the same.
    """
    places: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        places.setdefault(repr(prompt), []).append(i)
    if len(places) < 2:
        raise DataError(
            f"all {len(prompts)} answers of a batch belong to one prompt, so KTO has no mismatched answer "
            "to compare them with; give at least two different prompts, and batches larger than the number "
            "of answers to a prompt"
        )
    order = [i for rows in places.values() for i in rows]
    largest = max(places.values(), key=len)
    others = [i for rows in places.values() if rows is not largest for i in rows]
    out = [0] * len(order)
    for k, i in enumerate(order):
        out[i] = order[k - len(largest)]
    if len(largest) > len(others):
        for k, i in enumerate(largest):
            out[i] = others[k % len(others)]
    return out


def mismatch(one: TrainingSample, other: TrainingSample) -> TrainingSample:
    """The prompt of `one` with the answer of `other`."""
    start, end = one.mask.index(True), other.mask.index(True)

    def joined(name: str) -> tuple[object, ...]:
        return (*getattr(one, name)[:start], *getattr(other, name)[end:])

    columns = {name: joined(name) for name in ("token_ids", "mask", "behaviour_logprobs", "turn_ids")}
    return replace(one, **columns, images=(*one.images, *other.images))  # type: ignore[arg-type]


# -- records to samples -------------------------------------------------------------------------------------


def pair_data(
    bench: Workbench,
    train: Sequence[Row],
    held: Sequence[Row],
    settings: PreferenceSection,
    sampled: Sampled = NONE,
) -> tuple[PairData, Tally]:
    """(samples of pairs, without reference log-probabilities; what of the rows was kept, cut and dropped).

    Rows that `sampled` knows are taken in the tokens they were sampled in.
    """
    tally = Tally()

    def pairs(rows: Sequence[Row], name: str) -> list[Pair]:
        out = []
        for i, row in enumerate(rows):
            assert isinstance(row, Preference)
            if sides := sampled_row(sampled, row, f"{name}-{i}", _budget(settings)):
                tally.kept += 1
                out.append(as_pair(*sides))
                continue
            with naming(row.prompt):
                both = preference_samples(
                    bench.renderer, row, group_id=f"{name}-{i}", budget=_budget(settings), tally=tally
                )
            if not isinstance(both, Dropped):
                out.append(as_pair(*both))
        return out

    data = PairData(pairs(train, "pair"), pairs(held, "held"))
    _refuse_overlong(bench, [*data.train, *data.held])
    return data, tally


def as_pair(chosen: TrainingSample, rejected: TrainingSample) -> Pair:
    """Two samples of one group as a pair, which no micro-batch parts."""
    key = chosen.group_id
    return Pair(*(Answer(replace(side, trajectory_id=key)) for side in (chosen, rejected)))


def judged_data(
    bench: Workbench,
    train: Sequence[Row],
    held: Sequence[Row],
    settings: PreferenceSection,
    sampled: Sampled = NONE,
    *,
    seed: int,
) -> tuple[JudgedData, Tally]:
    """(single answers with their mismatched ones, without reference log-probabilities; what was kept).

    The held-out rows are one batch: they have one reference point.
    """
    tally = Tally()

    def samples(rows: Sequence[Row], name: str) -> list[tuple[Unpaired, TrainingSample]]:
        out = []
        for i, row in enumerate(rows):
            assert isinstance(row, Unpaired)
            if sides := sampled_row(sampled, row, f"{name}-{i}", _budget(settings)):
                tally.kept += 1
                out.append((row, sides[0]))
                continue
            with naming(row.prompt):
                one = unpaired_samples(
                    bench.renderer, row, group_id=f"{name}-{i}", budget=_budget(settings), tally=tally
                )
            if not isinstance(one, Dropped):
                out.append((row, one))
        return out

    kept, kept_held = samples(train, "answer"), samples(held, "held")
    if kept_held and len({repr(row.prompt) for row, _ in kept_held}) < 2:
        raise DataError(
            f"the {len(kept_held)} held-out answers belong to one prompt, so KTO has no mismatched answer to "
            f"compare them with; set preference.validation = {max(8, 2 * settings.validation)}, or 0"
        )
    batches = fixed_batches(len(kept), settings.batch_size, seed=seed)
    batches = of_several_prompts(batches, [repr(row.prompt) for row, _ in kept])
    everything = [list(range(len(kept_held)))] if kept_held else []
    data = JudgedData(as_judged(kept, batches), as_judged(kept_held, everything), batches)
    _refuse_overlong(bench, [*data.train, *data.held])
    return data, tally


def _refuse_overlong(bench: Workbench, items: Sequence[Pair | Judged]) -> None:
    """Of KTO's rows the mismatched answers too: another row's answer may be longer."""
    rows = ((answer.sample for answer in _all_answers(item)) for item in items)
    refuse_overlong(bench.policy, rows, too_long("preference.limits"))


def as_judged(rows: Sequence[tuple[Unpaired, TrainingSample]], batches: Sequence[list[int]]) -> list[Judged]:
    """Each answer with its mismatched one, within the batches."""
    other: dict[int, int] = {}
    for batch in batches:
        paired = mismatched_rows([rows[i][0].prompt for i in batch])
        other |= {i: batch[j] for i, j in zip(batch, paired, strict=True)}
    return [
        Judged(Answer(sample), Answer(mismatch(sample, rows[other[i]][1])), row.label)
        for i, (row, sample) in enumerate(rows)
    ]


def _budget(settings: PreferenceSection) -> Budget:
    return Budget(**settings.limits.model_dump())


# -- the reference ------------------------------------------------------------------------------------------


def with_reference(data: PairData | JudgedData, log: ReferenceLog) -> PairData | JudgedData:
    """The same data with the reference's log-probabilities, held-out rows included."""
    items = [*data.train, *data.held]
    answers = [answer for item in items for answer in _all_answers(item)]
    values = iter(log.of([answer.sample for answer in answers]))
    measured: list[Pair | Judged] = []
    for item in items:
        one, other = (Answer(answer.sample, next(values)) for answer in _all_answers(item))
        measured.append(Pair(one, other) if isinstance(item, Pair) else Judged(one, other, item.desirable))
    cut = len(data.train)
    return replace(data, train=measured[:cut], held=measured[cut:])  # type: ignore[arg-type]


def _all_answers(item: Pair | Judged) -> tuple[Answer, Answer]:
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item.answer, item.mismatched)
