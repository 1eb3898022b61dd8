"""Which path decodes this model: each is proven on random tokens before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepladder.engines.cache import Geometry, SlotCache
from stepladder.engines.forward import Forward, ModelForward, evaluating, windows
from stepladder.engines.plain import PlainForward
from stepladder.engines.weights import PolicyView
from stepladder.errors import ConfigError

log = logging.getLogger(__name__)
# What a model or a kernel raises when it is used in a way that it does not know.
UNSUPPORTED = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
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
def choose_path(view: PolicyView, max_context: int) -> Path:
    """The fastest path that gives the model's own log-probabilities.

    Raises:
        ConfigError: no path reproduces the model.
    """
    ids = _probe_ids(view, max_context)
    expected = _own_logits(view.model, ids)
    reason = _why_not_batched(view.model)
    if reason is None:
        geometry = _geometry(view.model, ids)
        if geometry is None:
            reason = "its layers do not all keep keys and values of one shape"
        else:
            store = SlotCache(geometry, view.dtype, view.device)
            forward: Forward = ModelForward(view.model, store, max_context)
            reason = _disagreement(forward, ids, expected, view.dtype)
            if reason is None:
                return Path("default", forward, store, view.refresh, view.fingerprint)
    kind = getattr(view.model.config, "model_type", type(view.model).__name__)
    log.warning(
        "%s decodes one sequence at a time, without sharing or keeping prefixes: %s. This is slow.",
        kind,
        reason,
    )
    plain = PlainForward(view.model)
    reason = _disagreement(plain, ids, expected, view.dtype)
    if reason is not None:
        raise ConfigError(f"the in-process engine cannot decode {kind}: {reason}; use a vLLM server instead")
    return Path("plain", plain, None, view.refresh, view.fingerprint)


def _probe_ids(view: PolicyView, max_context: int) -> Tensor:
    """Random tokens, longer than a sliding window where that is cheap: [1, n]."""
    reach = max((w for w in windows(view.model.config).values() if w is not None and w <= 1024), default=24)
    generator = torch.Generator().manual_seed(0)
    count = max(2, min(reach + 16, max_context))
    vocabulary = view.model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, vocabulary, (1, count), generator=generator)


def _own_logits(model: nn.Module, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    with evaluating(list(model.modules())):
        return model(input_ids=ids.to(device), use_cache=False).logits[0].float()


def _why_not_batched(model: nn.Module) -> str | None:
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


def _geometry(model: nn.Module, ids: Tensor) -> Geometry | None:
    """The shape of the cache that the model makes for itself, if all layers are alike."""
    device = next(model.parameters()).device
    with evaluating(list(model.modules())):
        out = model(input_ids=ids[:, :2].to(device), use_cache=True)
    made = getattr(out, "cache", None)
    made = made if made is not None else getattr(out, "past_key_values", None)
    shapes = set()
    for layer in getattr(made, "layers", []):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            shapes.add(None if tensor is None else (tensor.shape[1], tensor.shape[3]))
    if len(shapes) != 1 or None in shapes:
        return None
    ((kv_heads, head_dim),) = shapes
    return Geometry(len(made.layers), kv_heads, head_dim)


def _disagreement(forward: Forward, ids: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Run the probe as the scheduler would: a prefill, a longer neighbour, then the rest token by token."""
    count = ids.shape[1]
    head = max(1, count - 3)
    try:
        forward.reserve(2, count + 1)
        if forward.shares:  # slot 0 is one token behind slot 1: a ragged batch
            forward.run(ids[:, :1], [0], 1, [0])
            batch = torch.cat([ids[:, :head], torch.roll(ids, -1, 1)[:, :head]])
            got = [forward.run(batch, [0, 1], 0, None)[0]]
        else:
            got = [forward.run(ids[:, :head], [0], 0, None)[0]]
        for i in range(head, count):
            got.append(forward.run(ids[:, i : i + 1], [i], 0, None)[0])
    except UNSUPPORTED as error:
        return f"its forward pass refused our cache ({type(error).__name__}: {error})"
    finally:
        forward.drop(0)
    mine, own = torch.cat(got).float().log_softmax(-1), expected.log_softmax(-1)
    error = ((mine - own).abs().mean() / own.std()).item()
    limit = TOLERANCE[dtype]
    return (
        None if error <= limit else f"log-probabilities differ by {error:.2g} of their spread (limit {limit})"
    )
