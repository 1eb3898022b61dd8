"""Why do sampler and trainer disagree? Asked only once they do: each cause has a test that only it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches, whole_sample
from stepladder.engines.engine import PolicyEngine
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample

CLOSE = 5e-3  # nats a token: far above rounding in fp32, far below what any of the causes makes
CLOSE_ROUNDED = 0.1  # the same in bf16


@torch.no_grad()
def cause_of_mismatch(
    policy: Policy,
    engine: PolicyEngine,
    samples: Sequence[TrainingSample],
    *,
    temperature: float,
    token_budget: int = 4096,
) -> str:
    """One sentence that begins with "Cause:", from scores taken in several ways.

    In order: does the trainer agree with itself (dropout)? Do engine and trainer agree now, at temperature
    1 (else the weights differ)? Does another temperature explain what was stored?
    """
    some = [samples[i] for i in micro_batches(samples, token_budget)[0]]
    close = CLOSE if policy.dtype == engine.dtype == torch.float32 else CLOSE_ROUNDED
    if (noise := _apart(*[_scores(policy, some, temperature) for _ in range(2)])) > 1e-3:
        return (
            f"Cause: dropout is left on in the trainer: the same tokens scored twice differ by {noise:.3g} "
            f"nats a token{_dropouts(policy)}. Call model.eval() and set every dropout to 0"
        )
    whole = [whole_sample(s.token_ids, s.trajectory_id) for s in some]
    mine = policy.logprobs(whole).logprobs
    theirs = torch.zeros_like(mine)
    for b, sample in enumerate(whole):
        row = engine.token_logprobs(sample.token_ids)
        theirs[b, 1 : 1 + len(row)] = torch.tensor(row, device=mine.device)
    count = sum(len(s.token_ids) - 1 for s in whole)
    if (between := float((mine - theirs).abs().sum()) / count) > close:
        return (
            "Cause: the weight sync did not arrive: the engine holds other weights than the trainer (apart "
            "by "
            f"{between:.3g} nats a token at temperature 1)"
        )
    return _other_temperature(policy, some, temperature, close)


def _other_temperature(
    policy: Policy, samples: Sequence[TrainingSample], temperature: float, close: float
) -> str:
    """The weights agree; what was stored with the tokens does not."""
    stored = _stored(samples, policy.device)
    if not stored.any():
        return (
            "Cause: unknown; the engine's weights are the trainer's, and the trainer agrees with itself. "
            "Compare the two log-probabilities of a single token"
        )
    plain = _scores(policy, samples, 1.0)
    if temperature != 1.0 and _apart(plain, _scores(policy, samples, temperature)) < 1e-6:
        return (
            f"Cause: the temperature {temperature:g} is applied on one side only: the trainer's scores do "
            "not "
            "depend on it, the engine's do"
        )
    for other in dict.fromkeys((1.0, temperature**2, 1 / temperature)):
        if other != temperature and _apart(_scores(policy, samples, other), stored) <= close:
            return (
                f"Cause: the temperature is applied on one side only: the tokens were sampled at {other:g}, "
                "the "
                f"trainer scores them at {temperature:g}"
            )
    return (
        "Cause: the stored log-probabilities belong to other tokens or older weights: engine and trainer "
        "agree "
        "now, at every token. A sync that came after the sampling, or rows that were shifted, do this"
    )


def _scores(policy: Policy, samples: Sequence[TrainingSample], temperature: float) -> Tensor:
    return policy.logprobs(samples, temperature=temperature).logprobs


def _stored(samples: Sequence[TrainingSample], device: torch.device) -> Tensor:
    out = torch.zeros(len(samples), max(len(s.token_ids) for s in samples), device=device)
    for b, sample in enumerate(samples):
        out[b, : len(sample.behaviour_logprobs)] = torch.tensor(sample.behaviour_logprobs)
    return out


def _apart(a: Tensor, b: Tensor) -> float:
    """Mean |difference| over the places where either says something, in nats a token."""
    places = ((a != 0) | (b != 0)).sum().clamp(min=1)
    return float((a - b).abs().sum() / places)


def _dropouts(policy: Policy) -> str:
    """The modules that drop, by name, where they can be found."""
    found: list[str] = []
    for name, module in policy.model.named_modules():
        values: dict[str, Any] = vars(module)
        rate = next((v for k, v in values.items() if ("dropout" in k or k == "p") and _rate(v)), None)
        if rate is not None and (module.training or not isinstance(module, torch.nn.Dropout)):
            found.append(f"{name} {rate:g}")
    return f" ({', '.join(found[:3])})" if found else ""


def _rate(value: Any) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0
