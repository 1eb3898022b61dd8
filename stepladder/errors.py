"""The exception tree. Catch `StepladderError` to catch everything the library raises on purpose.

    StepladderError
    ├── ConfigError            a recipe, flag or argument is wrong (also a ValueError)
    │   └── ModelNotFound      a model could not be found or loaded
    ├── DataError              a dataset row, file or chat template cannot be used (also a ValueError)
    │   └── TemplateError      a chat template cannot render or continue a conversation
    ├── BoundaryError          something outside the trainer failed; becomes data, never reward 0
    │   ├── EngineError        the thing that generates tokens
    │   ├── ToolError          a tool call
    │   ├── EnvironmentFault   reset, step or close of an environment
    │   └── RewardError        a reward function or scorer
    ├── InvariantError         a promise of the trainer did not hold (ratio 1, weight sync, mask)
    ├── NothingToLearn         no group of tasks tells good episodes from bad ones
    ├── OutOfMemory            one trajectory, or the optimiser, needs more memory than there is
    ├── CheckpointError        a checkpoint cannot be written, read or resumed
    └── RunStopped             the run was interrupted on purpose; its state is saved

A `BoundaryError` ends one episode and is recorded with it; every other error ends the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class StepladderError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(StepladderError, ValueError):
    """A setting is wrong. The message says what, the value received and a value that works."""


class ModelNotFound(ConfigError):
    """A model is neither bundled, nor a local folder, nor reachable on a hub."""


class DataError(StepladderError, ValueError):
    """A row, a file or a whole dataset cannot be used."""


class TemplateError(DataError):
    """A chat template cannot render a conversation, or cannot continue it from its own prefix."""


class BoundaryError(StepladderError):
    """Something outside the trainer failed. `boundary` says where."""

    boundary: ClassVar[str] = "unknown"


class EngineError(BoundaryError):
    """Token generation failed for one request."""

    boundary = "engine"


class ToolError(BoundaryError):
    """A tool refused its input or failed; the message is shown to the model."""

    boundary = "tool"


class EnvironmentFault(BoundaryError):
    """`reset`, `step` or `close` of an environment raised or passed its deadline."""

    boundary = "environment"


class RewardError(BoundaryError):
    """A reward function raised, or returned something that is no number."""

    boundary = "reward"


class InvariantError(StepladderError):
    """A promise that training rests on does not hold; going on would train on wrong numbers."""


class NothingToLearn(StepladderError):
    """In every group that was tried all episodes earned the same. `all_solved`: because all succeeded."""

    def __init__(self, message: str, *, all_solved: bool = False) -> None:
        super().__init__(message)
        self.all_solved = all_solved


class OutOfMemory(StepladderError):
    """Memory ran out where no smaller micro-batch helps. The message says what to train less of."""


class CheckpointError(StepladderError):
    """A checkpoint could not be written, read or resumed."""


class RunStopped(StepladderError):
    """The run was interrupted (Ctrl-C, a signal) after its state was saved."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped `name`: " Did you mean 'x'?", or an empty string.

    >>> nearest("learnig_rate", ["learning_rate", "seed"])
    " Did you mean 'learning_rate'?"
    """
    spelt = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(name.casefold(), list(spelt), n=1, cutoff=0.6)
    return f" Did you mean {spelt[close[0]]!r}?" if close else ""
