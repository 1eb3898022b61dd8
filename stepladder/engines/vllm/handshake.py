"""The proof, before anything is trained, that a server samples from the policy and says so truly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from stepladder.engines.vllm.control import Control
from stepladder.engines.vllm.wire import Draw, completion, prompt_logprobs, scoring
from stepladder.errors import EngineError
from stepladder.types import Sampling

Scores: TypeAlias = Callable[
    [Sequence[int], float], Sequence[float]
]  # (ids, temperature) -> log p of ids[1:]


class Handshake:
    """Samples a few tokens and compares what the server says of them with what the policy says.

    Raw instead of processed log-probabilities, a penalty or a top-k taken from a generation_config, other
    weights: each shows as a difference, far above what types and kernels make.
    """

    TEMPERATURE = 0.5  # one that a server which leaves it out cannot hide

    def __init__(self, control: Control, vocabulary: int, max_context: int, dtype: torch.dtype) -> None:
        self.control, self.vocabulary = control, vocabulary
        self.ids: list[int] = []  # what was sampled, after its prompt
        self.prompt = [(7919 * i + 11) % vocabulary for i in range(min(8, max_context // 2))]
        self.count = min(24, max_context - len(self.prompt))
        self.tolerance = 0.01 if dtype == torch.float32 else 0.25  # mean, nats a token

    def run(self, scores: Scores) -> float:
        """The mean difference of log-probabilities at temperature 1, nats a token. Raises EngineError."""
        sampling = Sampling(self.TEMPERATURE, self.count, (), seed=1)
        draw = Draw(self.prompt, sampling, self.vocabulary)
        self.control.sample(completion(self.control.model, self.prompt, sampling), draw)
        self.ids = ids = [*self.prompt, *draw.ids]
        first = len(self.prompt) - 1
        scored = prompt_logprobs(self.control.score(scoring(self.control.model, ids)), ids)
        mismatch = _distance(scored, scores(ids, 1.0))
        if not mismatch <= self.tolerance:
            raise EngineError(
                f"the server's log-probabilities of {len(scored)} tokens differ from the policy's by "
                f"{mismatch:.3g} nats on average (allowed: {self.tolerance}); it serves other weights, or in "
                "another type than engine.dtype says"
            )
        off = _distance(draw.logprobs, scores(ids, self.TEMPERATURE)[first:])
        raw = _distance(draw.logprobs, scores(ids, 1.0)[first:])
        if raw < off:
            raise EngineError(
                f"the server returns log-probabilities without the temperature: sampled at "
                f"{self.TEMPERATURE}, they are {off:.3g} nats from the policy's there, {raw:.3g} from those "
                "at temperature 1; start it with --logprobs-mode processed_logprobs"
            )
        if not off <= self.tolerance / self.TEMPERATURE:
            raise EngineError(
                f"sampled tokens come with log-probabilities {off:.3g} nats from the policy's, though scored "
                f"ones agree ({mismatch:.3g}): the server changes the distribution (a penalty, a top-k)"
            )
        return mismatch


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
