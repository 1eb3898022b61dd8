"""`stepladder inspect`: the first batch of each rung as coloured tokens, before any training."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.text import Text

from stepladder.recipe.config import Recipe
from stepladder.rungs.coloured import LEGEND
from stepladder.rungs.preview import Preview
from stepladder.rungs.registry import prepare_run, rungs_of


def inspect_recipe(recipe: Recipe, *, samples: int, console: Console | None = None) -> None:
    """Print up to `samples` samples of the first batch of each rung that can show one."""
    console = console or Console()
    with contextlib.closing(prepare_run(recipe)) as bench:
        console.print(Text("   ").join(Text(what, style) for what, style in LEGEND))
        for rung in rungs_of(recipe):
            if (preview := rung.preview(bench, samples)) is not None:
                _print(console, preview)


def _print(console: Console, preview: Preview) -> None:
    console.rule(preview.headline)
    for note in preview.notes:
        console.print(note, highlight=False, markup=False)
    for shown in preview.shown:
        console.print(Text.assemble((shown.title, "bold"), f"  {shown.detail}"))
        console.print(shown.text)
        console.print()
