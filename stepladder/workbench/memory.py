"""When memory runs out in an update: smaller micro-batches, the same gradients.

Denominators belong to the whole step, so how a batch is cut changes nothing beyond float noise. An update
that finds no memory before its optimiser has stepped is therefore undone (its gradients are dropped) and
made again with fewer tokens at a time.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepladder.data.batching import micro_batches
from stepladder.errors import OutOfMemory
from stepladder.policies.fast.heap import trim_heap
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.types import TrainingSample

log = logging.getLogger("stepladder")

Metrics = dict[str, float]
# How allocators other than CUDA's say it: torch on a CPU, C++, cuBLAS, Apple's GPU.
_SIGNS = ("can't allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory")


@dataclass(slots=True)
class MemoryLimit:
    """How many tokens a micro-batch of this run may have, once memory ran out; `tokens` None: it never did.

    Made with the run, kept through its rungs and in its checkpoints. `say` is told once each time it falls.
    `recompute` turns activation checkpointing on, for when a single trajectory is too long; it returns False
    where that changes nothing.
    """

    tokens: int | None = None
    recompute: Callable[[], bool] = field(default=lambda: False)
    recomputing: bool = False
    say: Callable[[str], None] = field(default=log.warning)

    def budget(self, asked: int) -> int:
        """The token budget in force where the recipe asks for `asked`."""
        return asked if self.tokens is None else min(asked, self.tokens)

    def fit(
        self,
        samples: Sequence[TrainingSample],
        token_budget: int,
        optimizer: MasterOptimizer,
        update: Callable[[int], Metrics],
    ) -> Metrics:
        """What `update(token budget)` returns; where memory runs out, again with a smaller budget.

        `samples` are those that the update cuts by `micro_batches`; where it cannot cut them finer, layers
        are recomputed. With a limit in force the metrics say it, as `token_budget`. Raises OutOfMemory where
        a single trajectory does not fit, or the optimiser's own step; the weights are then untouched.
        """
        tokens = self.budget(token_budget)
        while True:
            said = ""
            try:
                metrics = update(tokens)
                return metrics if self.tokens is None else {**metrics, "token_budget": float(tokens)}
            except (RuntimeError, MemoryError) as error:
                if not ran_out(error):
                    raise
                said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            # The exception held the frames of the failed pass, and they its tensors; now it is gone.
            stepping = optimizer.stepping
            optimizer.clear()
            _give_back()
            if stepping:
                raise OutOfMemory(_no_room_for_moments(optimizer, said))
            less = smaller_budget(samples, tokens)
            if less is None:
                self._recompute(samples, tokens, said)
                continue
            self.say(
                f"memory ran out in an update with {tokens} tokens a micro-batch ({said}); nothing is lost: "
                f"it is made again with {less}, which stays so for the rest of the run (token_budget = "
                f"{less}). The gradients are the same, an update takes a little longer"
            )
            tokens = self.tokens = less

    def _recompute(self, samples: Sequence[TrainingSample], tokens: int, said: str) -> None:
        if not self.recompute():
            raise OutOfMemory(_no_room_for_one(samples, tokens, said))
        self.recomputing = True
        self.say(
            f"memory ran out in an update although each trajectory has a micro-batch of its own ({said}); "
            "nothing is lost: it is made again with layers that keep their inputs alone and are computed "
            "anew in the backward pass (activation checkpointing), which stays so for the rest of the run. "
            "The gradients are the same, an update takes about a quarter longer"
        )

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"tokens": self.tokens, "recomputing": self.recomputing}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.tokens, self.recomputing = state["tokens"], state["recomputing"]
        if self.recomputing:
            self.recompute()


def _give_back() -> None:
    """Return what is free to the system: allocators keep it in pieces, too small for what is asked for."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()


def ran_out(error: BaseException) -> bool:
    """Is this an allocator that found no memory?"""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def smaller_budget(samples: Sequence[TrainingSample], tokens: int) -> int | None:
    """The first of tokens/2, tokens/4, ... that cuts `samples` finer than `tokens` does.

    None where each trajectory has a micro-batch of its own already: it cannot be cut.
    """
    now = len(micro_batches(samples, tokens))
    while now < len({(s.group_id, s.trajectory_id) for s in samples}):
        tokens //= 2
        if len(micro_batches(samples, tokens)) > now:
            return tokens
    return None


def _no_room_for_one(samples: Sequence[TrainingSample], tokens: int, said: str) -> str:
    lengths: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = (sample.group_id, sample.trajectory_id)
        lengths[key] = lengths.get(key, 0) + len(sample.token_ids)
    (_, name), longest = max(lengths.items(), key=lambda item: item[1])
    return (
        f"memory ran out ({said}) though every trajectory has a micro-batch of its own (token_budget = "
        f"{tokens}): the longest, {name!r}, has {longest} tokens. Train on shorter ones "
        f"(rollout.max_context, or the rung's limit of tokens, below {longest}), or train less of the "
        "model: a section [model.lora], or model.train_embeddings = false; `stepladder plan` shows what "
        "takes how much"
    )


def _no_room_for_moments(optimizer: MasterOptimizer, said: str) -> str:
    size = 8 * sum(master.numel() for master in optimizer.masters.values())
    return (
        f"memory ran out in the optimiser's step ({said}): its two moments take {size / 1e9:.2f} GB, "
        "which no smaller micro-batch saves. Train less of the model: a section [model.lora], or "
        "model.train_embeddings = false; `stepladder plan` shows what takes how much"
    )
