"""Layers of a transformer that keep less for the backward pass, and compute the same.

Autograd keeps what each operation needs: an RMS norm written in plain torch keeps its input twice in
float32, a gated MLP its gate, the gate's activation and their product. Here they keep their inputs alone and
compute the rest again, which is a few passes over memory and no matrix product. With SmolLM2 in bfloat16
that is half of all activations.

A layer is replaced only where its outputs stay equal, bit for bit, on random inputs. An embedding's forward
pass is torch's own; only where its gradient goes is another matter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stepladder.policies.fast.lean_attention import attention_forward, looks_alike, stays_equal


class _RmsNorm(torch.autograd.Function):
    """w · x/√(mean x² + ε), the division in float32 and rounded before the product, as transformers does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        normal = wide * scale if wide is x else wide.mul_(scale).to(x.dtype)
        return weight * normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(torch.float32) * scale
        to_weight = None
        if ctx.needs_input_grad[1]:
            # A bfloat16 sum over tokens is accumulated in float32 by torch, as in the plain form.
            to_weight = (grad * normal.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0)
        wide = (grad * weight).to(torch.float32)
        # dx = (g − x̂·mean(g·x̂)) / √(mean x² + ε)
        along = (wide * normal).mean(-1, keepdim=True)
        to_x = wide.sub_(normal.mul_(along)).mul_(scale).to(x.dtype)
        return to_x, to_weight, None


class _GatedDown(torch.autograd.Function):
    """(silu(gate) · up) · Wᵀ, keeping gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight = ctx.needs_input_grad
        active = F.silu(gate)
        to_weight = None
        if needs_weight:
            flat = grad.reshape(-1, grad.shape[-1])
            to_weight = flat.t() @ (active * up).reshape(-1, up.shape[-1])
        inner = grad @ weight
        to_gate = torch.ops.aten.silu_backward(inner * up, gate) if needs_gate else None
        return to_gate, inner.mul_(active) if needs_up else None, to_weight


def _norm_forward(self: Any, x: Tensor) -> Tensor:
    out: Tensor = _RmsNorm.apply(x, self.weight, _eps(self))  # type: ignore[no-untyped-call]
    return out


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    if type(self.down_proj) is nn.Linear and self.down_proj.bias is None:
        out: Tensor = _GatedDown.apply(gate, up, self.down_proj.weight)
        return out
    plain: Tensor = self.down_proj(self.act_fn(gate) * up)  # such as a LoRA adapter
    return plain


def _eps(norm: Any) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


class _Embedding(torch.autograd.Function):
    """weight[ids]; the gradient goes to the rows of `ids` alone where the weight takes rows."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.add_rows, ctx.size = getattr(weight, "add_gradient_rows", None), len(weight)
        ctx.padding = -1 if padding is None else padding  # a token whose embedding is not trained
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.add_rows is None:
            dense = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.size, ctx.padding, False)
            return None, dense, None
        trained = ids != ctx.padding
        ctx.add_rows(ids[trained], grad[trained])
        return None, None, None


def _embedding_forward(self: Any, ids: Tensor) -> Tensor:
    out: Tensor = _Embedding.apply(ids, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
    return out


def _recomputed(self: Any, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(self).forward, self, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)  # there is no dropout


def recompute_layers(model: nn.Module) -> bool:
    """From now on each layer keeps its input alone, and is computed again in the backward pass (activation
    checkpointing, arXiv:1604.06174): about a quarter more time for an update.

    False where it changed nothing: all layers do so already, or the model has none that transformers marks
    as fit for it.
    """
    changed = False
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and "forward" not in vars(layer):
            layer.forward = MethodType(_recomputed, layer)
            changed = True
    return changed


def lean_layers(model: nn.Module) -> int:
    """Replace the forward pass of each layer that stays equal; how many were replaced."""
    verdicts: dict[tuple[Any, ...], bool] = {}
    replaced = 0
    for module in model.modules():
        if _plain_embedding(module):
            module.forward = MethodType(_embedding_forward, module)
        if looks_alike(module):
            if stays_equal(module):  # each asked by itself: SmolLM3's layers do not all rotate
                module.forward = MethodType(attention_forward, module)
                replaced += 1
            continue
        found = _candidate(module)
        if found is None:
            continue
        forward, width = found
        weights = next(module.parameters())
        key = (type(module), width, weights.dtype, weights.device)
        if key not in verdicts:
            verdicts[key] = _equal(module, forward, width)
        if verdicts[key]:
            module.forward = MethodType(forward, module)
            replaced += 1
    return replaced


def _plain_embedding(module: nn.Module) -> bool:
    if type(module) is not nn.Embedding:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _candidate(module: Any) -> tuple[Callable[..., Tensor], int] | None:
    """(the other forward pass, the width of its inputs) of a layer that looks like one we know."""
    if (
        type(module).__name__.endswith("RMSNorm")
        and _eps(module)
        and getattr(module, "weight", None) is not None
    ):
        return _norm_forward, module.weight.shape[-1]
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        down = module.down_proj
        if type(down) is nn.Linear and isinstance(getattr(module.gate_proj, "weight", None), Tensor):
            return _mlp_forward, module.gate_proj.weight.shape[-1]
    return None


@torch.no_grad()
def _equal(module: Any, forward: Callable[..., Tensor], width: int) -> bool:
    weights = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(1, 16, width, generator=generator)).to(weights)
    if forward is _norm_forward:  # before training its weight is 1, which hides where it rounds
        module = copy.deepcopy(module)
        module.weight.copy_(torch.randn(width, generator=generator))
    try:
        return torch.equal(module(x), forward(module, x))
    except (TypeError, RuntimeError):  # a layer of another kind, which takes other inputs
        return False
