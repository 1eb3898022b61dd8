"""stepladder: take a language model up the whole training ladder.

    import stepladder
    stepladder.train(stepladder.load_recipe("calculator"))

Names are loaded when they are used: importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Generation": "types",
    "Group": "types",
    "Message": "types",
    "Reset": "types",
    "Sampling": "types",
    "Score": "types",
    "Step": "types",
    "Task": "types",
    "Tool": "types",
    "ToolCall": "types",
    "Trajectory": "types",
    "TrainingSample": "types",
    "Turn": "types",
    "StepladderError": "errors",
    "Recipe": "recipe.config",
    "load_recipe": "recipe.config",
    "tool": "environments.tools",
    "check_environment": "environments.check",
    "load_world": "environments.environment",
    "Policy": "policies.policy",
    "LocalEngine": "engines.local.engine",
    "Renderer": "data.chat.renderer",
    "train": "ladder",
    "resume": "ladder",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from stepladder.data.chat.renderer import Renderer as Renderer
    from stepladder.engines.local.engine import LocalEngine as LocalEngine
    from stepladder.environments.check import check_environment as check_environment
    from stepladder.environments.environment import load_world as load_world
    from stepladder.environments.tools import tool as tool
    from stepladder.errors import StepladderError as StepladderError
    from stepladder.ladder import resume as resume
    from stepladder.ladder import train as train
    from stepladder.policies.policy import Policy as Policy
    from stepladder.recipe.config import Recipe as Recipe
    from stepladder.recipe.config import load_recipe as load_recipe
    from stepladder.types import Generation as Generation
    from stepladder.types import Group as Group
    from stepladder.types import Message as Message
    from stepladder.types import Reset as Reset
    from stepladder.types import Sampling as Sampling
    from stepladder.types import Score as Score
    from stepladder.types import Step as Step
    from stepladder.types import Task as Task
    from stepladder.types import Tool as Tool
    from stepladder.types import ToolCall as ToolCall
    from stepladder.types import TrainingSample as TrainingSample
    from stepladder.types import Trajectory as Trajectory
    from stepladder.types import Turn as Turn


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stepladder' has no attribute {name!r}")
    return getattr(importlib.import_module(f"stepladder.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
