"""What supervised fine-tuning is given, before any model: rows of a file, or a world's conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stepladder.data.files.datasets import convert, read_dataset
from stepladder.data.files.formats import noun
from stepladder.data.files.records import Demonstration, Text
from stepladder.data.files.split import fingerprint_of, repeated, split_by_content
from stepladder.environments.checked import CheckedWorld
from stepladder.errors import ConfigError, DataError
from stepladder.recipe.common import CommonRecipe
from stepladder.recipe.sft import SftSection
from stepladder.rungs.requirements import require_maker
from stepladder.types import Message
from stepladder.workbench.sources import Sources

Conversation: TypeAlias = Sequence[Message]
Row: TypeAlias = Demonstration | Text


def check_rows(
    recipe: CommonRecipe, world: CheckedWorld | None, settings: SftSection, sources: Sources
) -> None:
    """Read or make the rows. Raises `DataError` or `ConfigError` where they do not suit the settings."""
    if settings.data is not None:
        sources.once(file_rows, settings, recipe.run.seed)
    elif settings.demonstrations:
        assert world is not None
        require_maker(
            recipe,
            world.demonstrates,
            key="sft.demonstrations",
            what="demonstrations",
            method="demonstrations",
        )
        sources.once(made_conversations, world, settings, recipe.run.seed)


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


def made_conversations(
    world: CheckedWorld, settings: SftSection, seed: int
) -> tuple[list[Conversation], list[Conversation], str]:
    """(to train on, held out, what is said of them), made by a world that has demonstrations.

    The held-out ones are made from the next seed; those that the training ones have word for word are left
    out. Raises ConfigError where that is all of them, unless `sft.epochs` = 0 makes them idle.
    """
    train: list[Conversation] = [*world.demonstrations(settings.demonstrations, seed)]
    shown = {_key(c) for c in train}
    asked = settings.validation
    made = world.demonstrations(asked, seed + 1) if asked else []
    held: list[Conversation] = [c for c in made if _key(c) not in shown]
    if asked and not held and settings.epochs:
        raise ConfigError(
            f"sft.validation={asked} holds nothing out: the {len(train)} demonstrations of the environment "
            f"are {len(shown)} different conversation{'s' * (len(shown) > 1)}, and those made to be held out "
            "are among them. Set sft.validation = 0 (no early stop: sft.epochs = 3, say, are all run), or "
            "let demonstrations(count, seed) make others from another seed"
        )
    said = f"{len(train) + len(held):,} demonstrations of the environment"
    if again := asked - len(held):
        said += f"; {again:,} of {asked:,} left out of those held out, which training has too"
    return train, held, said


def _key(conversation: Conversation) -> str:
    return repr([(m.role, m.text) for m in conversation])
