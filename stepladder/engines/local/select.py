"""Which path decodes this model: each is proven on random tokens before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stepladder.engines.local.cache import Geometry, SlotCache
from stepladder.engines.local.forward import Forward, ModelForward, evaluating, windows
from stepladder.engines.local.fused import FusedForward, why_not_fused
from stepladder.engines.local.packing import UNSUPPORTED
from stepladder.engines.local.plain import PlainForward
from stepladder.engines.weights import PolicyView
from stepladder.errors import ConfigError

log = logging.getLogger(__name__)
# Mean |difference of log-probabilities| over their spread: float noise is far below, a wrong mask far above.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


@dataclass(slots=True)
class Path:
    """A forward pass, its cache (None where the model keeps its own), and how it takes new weights."""

    name: str
    forward: Forward
    store: SlotCache | None
    refresh: Callable[[], None]
    fingerprint: Callable[[], str]


@torch.no_grad()
def choose_path(
    view: PolicyView, max_context: int, fused: bool | Literal["auto"], pad_token_id: int = 0
) -> Path:
    """The fastest path that gives the model's own log-probabilities.

    Raises:
        ConfigError: no path reproduces the model, or `fused` is True and that one does not.
    """
    ids = _probe_ids(view.policy, max_context)
    expected = _own_logits(view.policy, ids)
    if fused is not False:
        path, reason = _fused_path(view, ids, expected, max_context)
        if path is not None:
            return path
        if fused is True:
            raise ConfigError(
                f"fused is True, but {_kind(view)} cannot take the fused path: {reason}; use 'auto'"
            )
    view.copy_if_needed()
    path, reason = _default_path(view, ids, expected, max_context, pad_token_id)
    if path is not None:
        return path
    log.warning(
        "%s decodes one sequence at a time, without sharing or keeping prefixes: %s. This is slow.",
        _kind(view),
        reason,
    )
    plain = PlainForward(view.model)
    reason = _disagreement(plain, ids, expected, _limit(view))
    if reason is not None:
        raise ConfigError(f"the in-process engine cannot decode {_kind(view)}: {reason}; use a vLLM server")
    return Path("plain", plain, None, view.refresh, view.fingerprint)


def _limit(view: PolicyView) -> float:
    """What separates float noise, of the coarser of the two types, from a mistake."""
    return max(TOLERANCE[view.dtype], TOLERANCE[next(view.policy.parameters()).dtype])


def _kind(view: PolicyView) -> str:
    return str(getattr(view.policy.config, "model_type", type(view.policy).__name__))


def _fused_path(
    view: PolicyView, ids: Tensor, expected: Tensor, max_context: int
) -> tuple[Path | None, str | None]:
    reason = why_not_fused(view.policy)
    if reason is not None:
        return None, reason
    geometry = _geometry(view.policy, ids)
    if geometry is None:
        return None, "its layers do not all keep keys and values of one shape"
    forward = FusedForward(view.policy, SlotCache(geometry, view.dtype, view.device), max_context, view.dtype)
    try:
        forward.refresh()
        reason = _disagreement(forward, ids, expected, _limit(view))
    except UNSUPPORTED as error:
        reason = f"packing its weights failed ({type(error).__name__}: {error})"
    if reason is not None:
        log.warning("%s takes the default path, which is slower: %s", _kind(view), reason)
        return None, reason
    return Path("fused", forward, forward.store, forward.refresh, lambda: forward.hash), None


def _default_path(
    view: PolicyView, ids: Tensor, expected: Tensor, max_context: int, pad_token_id: int
) -> tuple[Path | None, str | None]:
    reason = _why_not_batched(view.model)
    if reason is not None:
        return None, reason
    geometry = _geometry(view.model, ids)
    if geometry is None:
        return None, "its layers do not all keep keys and values of one shape"
    store = SlotCache(geometry, view.dtype, view.device)
    forward = ModelForward(view.model, store, max_context, pad_token_id)
    reason = _disagreement(forward, ids, expected, _limit(view))
    if reason is not None:
        return None, reason
    return Path("default", forward, store, view.refresh, view.fingerprint), None


def _probe_ids(model: Any, max_context: int) -> Tensor:
    """Random tokens, longer than a sliding window where that is cheap: [1, n]."""
    reach = max((w for w in windows(model.config).values() if w is not None and w <= 1024), default=24)
    generator = torch.Generator().manual_seed(0)
    count = max(2, min(reach + 16, max_context))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, vocabulary, (1, count), generator=generator)


def _own_logits(model: Any, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    with evaluating(list(model.modules())):
        logits: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return logits[0].float()


def _why_not_batched(model: Any) -> str | None:
    """What is known beforehand to be no plain causal attention."""
    config = model.config
    if (
        getattr(config, "vision_config", None) is not None
        or getattr(config, "audio_config", None) is not None
    ):
        return "it takes images or sound, for which sharing prefixes is not proven"
    others = set(windows(config)) - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        return "flash attention takes no mask of ours; load it with attn_implementation='sdpa'"
    return None


def _geometry(model: Any, ids: Tensor) -> Geometry | None:
    """The shape of the cache that the model makes for itself, if all layers are alike."""
    device = next(model.parameters()).device
    with evaluating(list(model.modules())):
        out = model(input_ids=ids[:, :2].to(device), use_cache=True)
    made = getattr(out, "cache", None)
    made = made if made is not None else getattr(out, "past_key_values", None)
    layers = list(getattr(made, "layers", []))
    shapes: set[tuple[int, int] | None] = set()
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            shapes.add(None if tensor is None else (tensor.shape[1], tensor.shape[3]))
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if shape is None else Geometry(len(layers), *shape)


def _disagreement(forward: Forward, ids: Tensor, expected: Tensor, limit: float) -> str | None:
    """Run the probe as the scheduler would: a prefill, a longer neighbour, then the rest token by token."""
    tokens: list[int] = ids[0].tolist()
    count = len(tokens)
    head = max(1, count - 3)
    try:
        forward.reserve(2, count + 1)
        if forward.shares:  # slot 0 is one token behind slot 1: a ragged batch
            forward.run([tokens[:1]], [0], 1)
            batch = [tokens[:head], [*tokens[1:head], tokens[0]]]
            got = [forward.run(batch, [0, 1], 0, every=True)[:head]]
        else:
            got = [forward.run([tokens[:head]], [0], 0, every=True)]
        for i in range(head, count):
            got.append(forward.run([tokens[i : i + 1]], [i], 0, every=True))
    except UNSUPPORTED as error:
        return f"its forward pass refused our cache ({type(error).__name__}: {error})"
    finally:
        forward.drop(0)
    mine = torch.cat(got).float().log_softmax(-1)
    own = expected.to(mine.device).log_softmax(-1)
    gap = ((mine - own).abs().mean() / own.std()).item()
    return None if gap <= limit else f"log-probabilities differ by {gap:.2g} of their spread (limit {limit})"
