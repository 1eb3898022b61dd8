"""Which setting makes a rung fit into memory: settings are tried in the plan, the mildest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stepladder.planning.plan import Plan
from stepladder.recipe.config import Recipe
from stepladder.recipe.run import LoraSection

ROOM = 0.9  # share of the free memory that a plan may take: allocators keep some of what is given back
LEAST_BUDGET = 256


def fits(peak: float, free: float) -> bool:
    """Is there room, and a tenth to spare?"""
    return peak <= ROOM * free


def advice(recipe: Recipe, name: str, free: float, planned: Callable[[Recipe], Plan]) -> str:
    """What to change so that the rung `name` fits into `free` bytes, with what it takes then.

    The first that is enough of: a smaller token_budget, frozen embeddings, an adapter, bfloat16, and each of
    the last three with a small token_budget.
    """
    for text, changed in _changes(recipe, name):
        peak = next(rung.peak for rung in planned(changed).rungs if rung.name == name)
        if fits(peak, free):
            return f"set {text}: about {peak / 1e9:.2f} GB"
    return (
        f"no setting of token_budget, model.train_embeddings, [model.lora] or model.dtype brings it under "
        f"{ROOM * free / 1e9:.2f} GB; take a smaller model, or a machine with more memory"
    )


def _changes(recipe: Recipe, name: str) -> Iterator[tuple[str, Recipe]]:
    budget = getattr(recipe, name).token_budget
    while (budget := budget // 2) >= LEAST_BUDGET:
        yield f"{name}.token_budget = {budget}", _with_budget(recipe, name, budget)
    small = _with_budget(recipe, name, min(LEAST_BUDGET, getattr(recipe, name).token_budget))
    also = f" and {name}.token_budget = {getattr(small, name).token_budget}"
    model = recipe.model
    options: list[tuple[str, dict[str, Any]]] = []
    if model.lora is None:
        if model.train_embeddings:
            options.append(("model.train_embeddings = false", {"train_embeddings": False}))
        options.append(("model.lora.rank = 16", {"lora": LoraSection(rank=16), "train_embeddings": True}))
    if model.dtype == "float32":
        options.append(('model.dtype = "bfloat16"', {"dtype": "bfloat16"}))
        if model.lora is None:
            both = {"lora": LoraSection(rank=16), "train_embeddings": True, "dtype": "bfloat16"}
            options.append(('model.lora.rank = 16 and model.dtype = "bfloat16"', both))
    for base, suffix in ((recipe, ""), (small, also)):
        for text, update in options:
            changed = base.model_copy(update={"model": base.model.model_copy(update=update)})
            yield text + suffix, changed


def _with_budget(recipe: Recipe, name: str, budget: int) -> Recipe:
    section = getattr(recipe, name).model_copy(update={"token_budget": budget})
    return recipe.model_copy(update={name: section})
