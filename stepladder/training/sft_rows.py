"""The rows of a file that supervised fine-tuning is given: of a kind it can use, split, before any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stepladder.data.datasets import convert, read_dataset
from stepladder.data.formats import noun
from stepladder.data.records import Demonstration, Text
from stepladder.data.split import fingerprint_of, repeated, split_by_content
from stepladder.errors import ConfigError, DataError
from stepladder.sections.sft import SftSection

Row: TypeAlias = Demonstration | Text


@dataclass(frozen=True, slots=True)
class SftRows:
    """Rows to train on and rows held out, with nothing in common; `description` says where they are from."""

    train: list[Row]
    held: list[Row]
    description: str

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([*self.train, *self.held])


def file_rows(settings: SftSection, seed: int) -> SftRows:
    """The rows of `sft.data`. Raises `DataError` or `ConfigError` where they do not suit the settings."""
    assert settings.data is not None
    dataset = read_dataset(settings.data)
    if dataset.kind != "text":
        dataset = convert(dataset, "demonstration")
    if dataset.kind == "text" and settings.train != "full":
        raise ConfigError(
            f"sft.train={settings.train!r} needs turns of an assistant, but the data are texts "
            f'({dataset.description}); try sft.train = "full"'
        )
    if settings.train == "completion" and not all(r.answers_from for r in dataset.records):
        raise ConfigError(
            'sft.train="completion" needs rows of a prompt and a completion, but the data are conversations '
            f'({dataset.description}); try sft.train = "assistant"'
        )
    if len(dataset) <= settings.validation:
        raise DataError(
            f"{settings.data} has {len(dataset)} {noun(dataset.kind, len(dataset))}, sft.validation holds "
            f"back {settings.validation}; try sft.validation = {len(dataset) // 5}"
        )
    train, held = split_by_content(dataset.records, settings.validation, seed)
    again = repeated(len(dataset) - len(train) - len(held))
    return SftRows(train, held, "; ".join(filter(None, (dataset.description, again))))
