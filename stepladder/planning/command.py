"""`stepladder plan`: a recipe, or a run folder, to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stepladder.planning.advice import advice, fits
from stepladder.planning.machine import Machine, free_memory, measure
from stepladder.planning.measured import read_measured
from stepladder.planning.needs import Needs
from stepladder.planning.plan import Plan, plan_recipe
from stepladder.planning.show import plan_text
from stepladder.policies.pretrained import pick_device, pick_dtype
from stepladder.recipe.config import Recipe, load_recipe

NeedsOf = Callable[[Recipe], Mapping[str, Needs]]


def plan_command(recipe: str, overrides: Sequence[str], needs_of: NeedsOf) -> str:
    """The plan of a recipe by name or file; of a run folder, with what was measured in it."""
    run = Path(recipe)
    source = run / "recipe.toml" if (run / "recipe.toml").is_file() else None
    loaded = load_recipe(source or recipe, overrides)
    device, dtype = chosen(loaded)
    free, total, who = free_memory(device)
    machine = Machine(device, free, total, who, *measure(device, dtype, loaded.run.threads))
    plan = plan_recipe(loaded, needs_of(loaded), device=device, dtype=dtype, machine=machine)

    def planned(changed: Recipe) -> Plan:
        where, kind = chosen(changed)
        return plan_recipe(changed, needs_of(changed), device=where, dtype=kind)

    model = loaded.model.model_copy(update={"dtype": dtype})
    fixed = loaded.model_copy(update={"model": model})
    advised = {
        rung.name: advice(fixed, rung.name, free, planned) for rung in plan.rungs if not fits(rung.peak, free)
    }
    measured = read_measured(run) if source is not None else {}
    return plan_text(recipe, plan, machine, advice=advised, measured=measured)


def chosen(recipe: Recipe) -> tuple[str, str]:
    """(device, type) that "auto" stands for here."""
    model = recipe.model
    device = pick_device(model.device)
    tiny = (model.name, model.dtype) == ("tiny", "auto")
    return device, str(pick_dtype("float32" if tiny else model.dtype, device)).removeprefix("torch.")
