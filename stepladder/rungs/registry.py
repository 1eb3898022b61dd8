"""The rungs of the ladder, in the order in which they are climbed. A new rung is a folder and a line here."""

from __future__ import annotations

from stepladder.planning.needs import Needs
from stepladder.recipe.config import Recipe, rung_sections
from stepladder.rungs.base import Rung
from stepladder.rungs.distillation.rung import DistillationRung
from stepladder.rungs.preference.rung import PreferenceRung
from stepladder.rungs.rejection_sampling.rung import RejectionSamplingRung
from stepladder.rungs.reward_model.process_rung import ProcessRewardModelRung
from stepladder.rungs.reward_model.rung import RewardModelRung
from stepladder.rungs.rl.rung import RlRung
from stepladder.rungs.sft.rung import SftRung
from stepladder.workbench.bench import Workbench
from stepladder.workbench.prepare import prepare

_IN_ORDER: tuple[type[Rung], ...] = (
    SftRung,
    DistillationRung,
    RejectionSamplingRung,
    PreferenceRung,
    RewardModelRung,
    ProcessRewardModelRung,
    RlRung,
)
RUNGS = {rung.name: rung for rung in _IN_ORDER}
"""By name, which is that of the recipe's section."""


def rungs_of(recipe: Recipe) -> list[type[Rung]]:
    """Return the rungs whose section the recipe has, in order."""
    return [rung for name, rung in RUNGS.items() if getattr(recipe, name) is not None]


def trains_policy(rung: type[Rung]) -> bool:
    """Return whether the policy is another one after the rung."""
    return rung_sections()[rung.name].trains_policy


def needs_of(recipe: Recipe) -> dict[str, Needs]:
    """Return what each rung of the recipe needs, for its plan."""
    return {rung.name: rung.needs(rung.section_of(recipe)) for rung in rungs_of(recipe)}


def prepare_run(recipe: Recipe) -> Workbench:
    """Prepare what the recipe's rungs are handed; each of them checks its data before a model is loaded."""
    return prepare(recipe, rungs_of(recipe))
