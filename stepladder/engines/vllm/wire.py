"""What is said to a vLLM server and what is accepted from it: ids, log-probabilities, and no surprises.

A server may be of another version, started with other defaults, or no vLLM at all. Every answer is checked:
ids against the prompt and the stop tokens that were asked for, one finite log-probability for each token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from stepladder.errors import ConfigError, EngineError
from stepladder.types import FinishReason, Sampling

# vLLM takes everything below for greedy or replaces it by this, without saying so in its answer.
SMALLEST_TEMPERATURE = 0.01
_ABSENT = -9999.0  # what vLLM writes for a log-probability of minus infinity


def completion(model: str, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """The body of a streamed /v1/completions request: ids in, ids out.

    Every parameter that changes the distribution is given, for what is left out is taken from the model's
    generation_config (a repetition penalty, a top-k). `ignore_eos`: only the stop ids asked for end a turn.

    Raises ConfigError for sampling parameters that vLLM would replace.
    """
    if 0.0 < sampling.temperature < SMALLEST_TEMPERATURE:
        raise ConfigError(
            f"vLLM raises a temperature below {SMALLEST_TEMPERATURE} to it; got {sampling.temperature}; use "
            f"0 (greedy) or at least {SMALLEST_TEMPERATURE}"
        )
    return _neutral(model, prompt_ids) | {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed & (2**63 - 1),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def scoring(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """The body of a request for the log-probabilities of the prompt itself."""
    return _neutral(model, token_ids) | {
        "max_tokens": 1, "temperature": 1.0, "seed": 0, "prompt_logprobs": 0, "stream": False
    }  # fmt: skip


def _neutral(model: str, prompt_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "n": 1,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop": [],
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


class Draw:
    """What a streamed request has brought so far. Feed it the lines of the answer.

    `ids` and `logprobs` always have one length; they stay usable when the stream is cut by a weight sync.
    """

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, vocabulary: int) -> None:
        self.prompt_ids, self.sampling = list(prompt_ids), sampling
        self.vocabulary = vocabulary
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.prefilled = self.cached = 0  # prompt tokens, as the server counts them
        self.ended = False

    def feed(self, line: str) -> int:
        """Take one line of the stream; returns how many tokens it brought. Raises EngineError."""
        if not line.startswith("data:"):
            return 0
        data = line[5:].strip()
        if data == "[DONE]":
            self._end()
            return 0
        try:
            chunk = json.loads(data)
            if usage := chunk.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                self.cached += details.get("cached_tokens") or 0
                self.prefilled += usage["prompt_tokens"] - (details.get("cached_tokens") or 0)
            return sum(self._take(choice) for choice in chunk["choices"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise EngineError(
                f"the server's answer is no completion with token ids ({type(error).__name__}: {error}): "
                f"{data[:300]}; a vLLM of 0.10.2 or later is needed"
            ) from error

    def _take(self, choice: dict[str, Any]) -> int:
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and prompt != self.prompt_ids:
            raise EngineError(_different("the prompt", self.prompt_ids, prompt))
        ids = choice["token_ids"]
        given = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        if [f"token_id:{i}" for i in ids] != given["tokens"]:
            raise EngineError(
                f"the server gave log-probabilities of {given['tokens'][:5]} for the tokens {ids[:5]}: they "
                "do not belong together"
            )
        self.ids += ids
        self.logprobs += usable(given["token_logprobs"], len(ids), "sampled")
        outside = [i for i in ids if not 0 <= i < self.vocabulary]
        if outside:
            raise EngineError(
                f"the server sampled token id {outside[0]}, outside the policy's vocabulary 0 .. "
                f"{self.vocabulary - 1}: it serves another model"
            )
        if (reason := choice.get("finish_reason")) is not None:
            self._finish(reason)
        return len(ids)

    def _finish(self, reason: str) -> None:
        at_stop = bool(self.ids) and self.ids[-1] in self.sampling.stop_token_ids
        if reason == "stop" and at_stop:
            self.finish_reason = "stop"
        elif reason == "length" and len(self.ids) == self.sampling.max_tokens:
            self.finish_reason = "length"
        else:
            raise EngineError(
                f"the server ended a turn for the reason {reason!r} after {len(self.ids)} of "
                f"{self.sampling.max_tokens} tokens, the last being {self.ids[-1:]}; asked for were the stop "
                f"ids {list(self.sampling.stop_token_ids)[:8]}. A stop token is kept, and nothing else ends "
                "a turn: start the server with --generation-config vllm"
            )

    def _end(self) -> None:
        self.ended = True
        if self.finish_reason is None:
            raise EngineError(
                f"the server ended its answer after {len(self.ids)} of {self.sampling.max_tokens} tokens "
                "without a reason"
            )


def prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """log p of `token_ids[1:]` from an answer to `scoring`. Raises EngineError where they are not there."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        values = [row.get(str(i), {}).get("logprob") for row, i in zip(rows, token_ids[1:], strict=True)]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(
            f"the server's answer holds no prompt_logprobs of the {len(token_ids)} tokens asked for "
            f"({type(error).__name__}: {error}): {str(answer)[:300]}"
        ) from error
    return usable(values, len(token_ids) - 1, "prompt")


def usable(values: Sequence[float | None], expected: int, what: str) -> list[float]:
    """The log-probabilities, all there, finite and at most 0 (but for float noise).

    A missing one must not become NaN: as a ratio it would count as 1, or slip through both bounds of a clip.
    """
    if len(values) != expected:
        raise EngineError(f"{expected} {what} tokens came with {len(values)} log-probabilities")
    good = [v for v in values if v is not None and math.isfinite(v) and _ABSENT < v <= 1e-4]
    if len(good) != expected:
        bad = next(v for v in values if v is None or not (math.isfinite(v) and _ABSENT < v <= 1e-4))
        raise EngineError(
            f"{expected - len(good)} of {expected} {what} tokens came without a usable log-probability (the "
            f"first is {bad}); nothing can be trained on them"
        )
    return [min(v, 0.0) for v in good]


def _different(what: str, asked: Sequence[int], got: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(asked, got)) if a != b), min(len(asked), len(got)))
    return (
        f"the server changed {what}: {len(asked)} ids were sent and {len(got)} used, the first difference at "
        f"{at} ({list(asked[at : at + 1])} became {list(got[at : at + 1])})"
    )
