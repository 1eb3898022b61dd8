"""Data as users have it: a file, recognised by its columns, as a list of records and one line that says so.

read_dataset("pairs.parquet").description
'pairs.parquet: 1,200 preferences (columns prompt, chosen, rejected; implicit prompt in 3)'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

from stepladder.data.files.disk import RawRow, read_rows
from stepladder.data.files.formats import AMBIGUOUS, FORMATS, Format, noun
from stepladder.data.files.records import (
    Demonstration,
    Kind,
    Preference,
    Ranking,
    Record,
    Steps,
    Text,
    Unpaired,
)
from stepladder.data.files.row import Row, present
from stepladder.data.files.split import fingerprint_of
from stepladder.errors import DataError

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Dataset(Generic[R]):
    """Records of one kind. `description` is one line for people; `fingerprint` hashes the records."""

    records: list[R]
    kind: Kind
    description: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.records)


@overload
def read_dataset(path: str | Path, kind: Literal["demonstration"]) -> Dataset[Demonstration]: ...
@overload
def read_dataset(path: str | Path, kind: Literal["text"]) -> Dataset[Text]: ...
@overload
def read_dataset(path: str | Path, kind: Literal["preference"]) -> Dataset[Preference]: ...
@overload
def read_dataset(path: str | Path, kind: Literal["unpaired"]) -> Dataset[Unpaired]: ...
@overload
def read_dataset(path: str | Path, kind: Literal["ranking"]) -> Dataset[Ranking]: ...
@overload
def read_dataset(path: str | Path, kind: Literal["steps"]) -> Dataset[Steps]: ...
@overload
def read_dataset(
    path: str | Path, kind: Kind | None = None, *, ambiguous_as: Kind | None = None
) -> Dataset[Any]: ...


def read_dataset(
    path: str | Path, kind: Kind | None = None, *, ambiguous_as: Kind | None = None
) -> Dataset[Any]:
    """The records of a file, a folder, a glob or a saved `datasets` folder (docs/data.md lists the formats).

    `kind=None` takes the file for what its columns say. Another kind is made from it where that loses
    nothing: see `convert`. `ambiguous_as` says what columns mean that fit a ranking as well as steps, and is
    no wish else. Every row is read in the format of most rows. Raises `DataError` naming the row
    and the field that does not fit, or what the file is where it is not the kind that was asked for.
    """
    rows, left_out = read_rows(path)
    format, also = _recognise(rows, str(path), kind, ambiguous_as or kind)
    notes: Counter[str] = Counter()
    records = [_read(format, Row(values, where, notes), also) for values, where in rows]
    parts = [_columns(format, rows), *(f"{what} in {count:,}" for what, count in sorted(notes.items()))]
    if also:
        parts.append(f"read as {format.name}, not as {' or '.join(f.name for f in also)}")
    if left_out:
        parts.append(f"left out {', '.join(left_out)}")
    text = f"{Path(path).name}: {len(records):,} {noun(format.kind, len(records))} ({'; '.join(parts)})"
    dataset = Dataset(records, format.kind, text, fingerprint_of(records))
    return dataset if kind is None else convert(dataset, kind)


def convert(dataset: Dataset[Any], kind: Kind) -> Dataset[Any]:
    """The same data as another kind: what is left out of it is said in the description.

    preference -> unpaired (a row a side), preference -> demonstration (the chosen side), ranking ->
    preference (all pairs that differ), unpaired -> demonstration (the rows labelled true). Raises `DataError`
    for any other pair of kinds.
    """
    if dataset.kind == kind:
        return dataset
    make = _CONVERSIONS.get((dataset.kind, kind))
    if make is None:
        possible = [noun(to) for of, to in _CONVERSIONS if of == dataset.kind]
        can = f"; they can be made into {' or '.join(possible)}" if possible else ""
        wanted = [f.example for f in FORMATS if f.kind == kind]
        raise DataError(
            f"{dataset.description} cannot be used as {noun(kind)}{can}. Give rows such as {wanted[0]}"
        )
    records, how = make(dataset.records)
    if not records:
        raise DataError(f"{dataset.description} gives no {noun(kind)} ({how})")
    text = f"{dataset.description} -> {len(records):,} {noun(kind, len(records))} ({how})"
    return Dataset(records, kind, text, fingerprint_of(records))


# -- recognition ------------------------------------------------------------------------------------------


def _recognise(
    rows: Sequence[RawRow], name: str, kind: Kind | None, meaning: Kind | None
) -> tuple[Format, list[Format]]:
    """(the format of most rows, others that fit the same rows but say less)."""
    shapes = Counter(frozenset(k for k, v in values.items() if present(v)) for values, _ in rows)
    shape = shapes.most_common(1)[0][0]
    values, where = next((v, w) for v, w in rows if shape == frozenset(k for k, x in v.items() if present(x)))
    fitting = [f for f in FORMATS if f.fits(values)]
    if not fitting:
        # A row with another shape may be right where most rows are not.
        raise DataError(
            f"{where}: the columns {', '.join(map(str, values)) or 'of an empty object'} fit no format; "
            f"give one of {'; '.join(dict.fromkeys(f.example for f in FORMATS))}"
        )
    best = fitting[0]
    names = {f.name for f in fitting}
    if best.name in AMBIGUOUS and names.issuperset(AMBIGUOUS):
        of_kind = [f for f in fitting if f.name in AMBIGUOUS and f.kind == meaning]
        if not of_kind and meaning == "preference":
            of_kind = [best]
        if not of_kind:
            raise DataError(
                f"{name}: prompt and completions fit two meanings, {noun('ranking')} (the best first) and "
                f'{noun("steps")} (one solution); say which with kind="ranking" or kind="steps", or add a '
                'column "scores" or "labels"'
            )
        best = of_kind[0]
    if kind is not None and best.kind != kind and (best.kind, kind) not in _CONVERSIONS:
        best = next((f for f in fitting if f.kind == kind), best)
    others = [f for f in fitting if f is not best and f.kind != best.kind and f.name not in AMBIGUOUS]
    return best, others


def _read(format: Format, row: Row, also: Sequence[Format]) -> Record:
    try:
        return format.read(row)
    except DataError as problem:
        if format.fits(row.values):
            raise
        fits = next((f for f in FORMATS if f.fits(row.values)), None)
        hint = f"; this row alone would be a {noun(fits.kind, 1)}" if fits is not None else ""
        raise DataError(
            f"{problem} (most rows are {noun(format.kind)}, such as {format.example}{hint})"
        ) from problem


def _columns(format: Format, rows: Sequence[RawRow]) -> str:
    """The columns that are read, and those that are not."""
    seen = dict.fromkeys(str(k) for values, _ in rows for k, v in values.items() if present(v))
    used = set().union(*(format.read_columns(values) for values, _ in rows))
    read = [name for name in seen if name in used]
    unread = [name for name in seen if name not in used]
    ignored = f"; ignored {', '.join(unread)}" if unread else ""
    return f"column{'s' * (len(read) > 1)} {', '.join(read)}{ignored}"


# -- conversions ------------------------------------------------------------------------------------------


def _both_sides(records: Sequence[Preference]) -> tuple[list[Record], str]:
    rows: list[Record] = []
    for r in records:
        rows += [Unpaired(r.prompt, r.chosen, True, r.tools), Unpaired(r.prompt, r.rejected, False, r.tools)]
    return rows, "a row for each side"


def _chosen(records: Sequence[Preference]) -> tuple[list[Record], str]:
    return [
        Demonstration((*r.prompt, *r.chosen), r.tools, answers_from=len(r.prompt)) for r in records
    ], "the chosen side"


def _liked(records: Sequence[Unpaired]) -> tuple[list[Record], str]:
    liked: list[Record] = [
        Demonstration((*r.prompt, *r.completion), r.tools, answers_from=len(r.prompt))
        for r in records
        if r.label
    ]
    return liked, f"those labelled true; {len(records) - len(liked):,} labelled false left out"


def _pairs(records: Sequence[Ranking]) -> tuple[list[Record], str]:
    rows: list[Record] = []
    ties = 0
    for r in records:
        ranks = r.ranks or tuple(range(1, len(r.completions) + 1))
        for i, good in enumerate(r.completions):
            for j in range(i + 1, len(r.completions)):
                if ranks[i] == ranks[j]:
                    ties += 1
                    continue
                pair = Preference(r.prompt, good, r.completions[j], r.tools)
                rows.append(replace(pair, margin=r.scores[i] - r.scores[j]) if r.scores else pair)
    return rows, "all pairs" + (f"; {ties:,} of equally good ones left out" if ties else "")


_CONVERSIONS: dict[tuple[Kind, Kind], Any] = {
    ("preference", "unpaired"): _both_sides,
    ("preference", "demonstration"): _chosen,
    ("ranking", "preference"): _pairs,
    ("unpaired", "demonstration"): _liked,
}
