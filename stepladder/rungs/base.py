"""What one rung of the ladder is: it trains (or gathers something) from where its state stands to its end.

A rung is made anew in a resumed run, takes back its state and tensors from the checkpoint, and goes on.
What it needs from the run it gets from `Run`: the parts, the log, and checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stepladder.environments.checked import CheckedWorld
from stepladder.errors import CheckpointError
from stepladder.planning.needs import Needs
from stepladder.policies.optimizer import MasterOptimizer, trainable
from stepladder.policies.policy import Policy
from stepladder.recipe.common import CommonRecipe
from stepladder.run.interrupt import uninterrupted
from stepladder.rungs.preview import Preview
from stepladder.rungs.run import Run
from stepladder.workbench.bench import Workbench
from stepladder.workbench.sources import Sources


class Rung:
    """The base of all rungs. Subclasses give `name`, `climb`, and what `state` and `load` hold besides.

    `name` is the recipe's section, the phase of metrics.jsonl and the label of the evaluation after it.
    """

    name: ClassVar[str]
    syncs_engine: ClassVar[bool] = False  # True: the engine has the last weights when `climb` is over

    def __init__(self, run: Run) -> None:
        self.run = run
        self.optimizer: MasterOptimizer | None = None

    @classmethod
    def section_of(cls, recipe: CommonRecipe) -> Any:
        """Return the rung's own section of the recipe."""
        return getattr(recipe, cls.name)

    @classmethod
    def check(cls, recipe: CommonRecipe, world: CheckedWorld | None, sources: Sources) -> None:
        """Raise ConfigError or DataError for a file or a world that does not give what the section asks for.

        It is called before a model is loaded. What it reads it reads through `sources`, where the rung finds
        it.
        """

    @classmethod
    def needs(cls, section: Any) -> Needs:
        """Return what the rung's plan needs to know of its section."""
        raise NotImplementedError

    @classmethod
    def check_policy(cls, recipe: CommonRecipe, policy: Policy) -> None:
        """Raise ConfigError where the rung cannot work with this policy; called once it is loaded."""

    @classmethod
    def preview(cls, bench: Workbench, samples: int) -> Preview | None:
        """Return the first `samples` as they will be trained, for `stepladder inspect`.

        None where there are none before the rungs below are climbed.
        """
        return None

    @property
    def step(self) -> int:
        """Steps done."""
        raise NotImplementedError

    def climb(self) -> None:
        """From where the state stands to the end of the rung; the policy then holds its best weights."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Plain JSON: counters and cursors."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, as they are."""
        if self.optimizer is not None:
            return self.optimizer.tensors()
        return policy_tensors(self.run.bench.policy.model)

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The opposite of `state` and `tensors`."""
        raise NotImplementedError

    def load_optimizer(self, tensors: Mapping[str, Tensor], model: nn.Module, max_grad_norm: float) -> None:
        """Take weights and moments back, where the checkpoint was taken after training began."""
        if any(name.startswith(POLICY) for name in tensors):
            load_policy(model, tensors)
            return
        self.optimizer = MasterOptimizer(trainable(model), max_grad_norm=max_grad_norm)
        self.optimizer.load(dict(tensors))

    @contextlib.contextmanager
    def training(self, model: nn.Module, max_grad_norm: float) -> Iterator[MasterOptimizer]:
        """The rung's optimiser: the restored one of a resumed run, else a new one. Closed at the end."""
        with uninterrupted():
            if self.optimizer is None:
                self.optimizer = MasterOptimizer(trainable(model), max_grad_norm=max_grad_norm)
        yield self.optimizer
        with uninterrupted():  # after an error it stays: a Ctrl-C is still to be saved
            self.optimizer.close()
            self.optimizer = None


POLICY = "policy/"  # of the names of weights that were saved without an optimiser


def policy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training updates, for a checkpoint."""
    return {f"{POLICY}{name}": p.detach() for name, p in trainable(model).items()}


@torch.no_grad()
def load_policy(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the weights of `policy_tensors` back. Raises CheckpointError where one is missing."""
    for name, parameter in trainable(model).items():
        saved = tensors.get(f"{POLICY}{name}")
        if saved is None or saved.shape != parameter.shape:
            raise CheckpointError(
                f"the checkpoint has no weights {name!r} of shape {tuple(parameter.shape)}; was the model "
                "section of the recipe changed since the run began?"
            )
        parameter.copy_(saved)
