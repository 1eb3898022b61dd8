"""Self-attention of a Llama-like layer on a packed row, without the copies that heads and rotations cost.

transformers turns queries and keys around by five operations each, on views with the heads in front, and
autograd goes back through all of them. Here they stay [N, heads, d], as the projections wrote them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stepladder.data.batching import Block
from stepladder.policies.fast.attention import NAME, Layout
from stepladder.policies.fast.row_attention import row_attention
from stepladder.policies.fast.tiles import tiling


class _Rotated(torch.autograd.Function):
    """x·cos + rotate_half(x)·sin of x [N, heads, d] (RoPE, arXiv:2104.09864), rounded as transformers does.

    Keeps the two tables. The backward pass is the rotation by the opposite angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The tables have two equal halves, so the transposed rotation is the one by the negative angle.
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half] -= x[..., half:] * sin[..., :half]
    out[..., half:] += x[..., :half] * sin[..., half:]
    return out


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The layer's own forward pass, but for a packed row on a CPU."""
    layout: Layout | None = kwargs.get("layout")
    if layout is None or layout.tiling is None or position_embeddings is None or cache is not None:
        if cache is not None:
            kwargs["cache"] = cache
        plain: tuple[Tensor, None] = type(self).forward(
            self,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )
        return plain
    rows = hidden_states[0]
    shape = (len(rows), -1, self.head_dim)
    cos, sin = (table[0].unsqueeze(1) for table in position_embeddings)
    q: Tensor = _Rotated.apply(self.q_proj(rows).view(shape), cos, sin)  # type: ignore[no-untyped-call]
    k: Tensor = _Rotated.apply(self.k_proj(rows).view(shape), cos, sin)  # type: ignore[no-untyped-call]
    v = self.v_proj(rows).view(shape)
    mixed = row_attention(q, k, v, layout.tiling, self.scaling)
    out: Tensor = self.o_proj(mixed.view(len(rows), -1))
    return out[None], None


def looks_alike(module: Any) -> bool:
    """Is this an attention that rotates queries and keys, and does nothing else to them?"""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "config")
    if not isinstance(module, nn.Module) or not all(hasattr(module, name) for name in parts):
        return False
    on_cpu = all(p.device.type == "cpu" for p in module.parameters())
    config: Any = module.config
    return config._attn_implementation == NAME and on_cpu


@torch.no_grad()
def stays_equal(module: Any) -> bool:
    """Are outputs the layer's own, bit for bit, on random inputs and random angles?"""
    generator = torch.Generator().manual_seed(0)
    weight = next(module.parameters())
    n, width = 16, module.config.get_text_config().hidden_size
    x = torch.randn(1, n, width, generator=generator).to(weight.dtype)
    angles = torch.randn(1, n, module.head_dim // 2, generator=generator).repeat(1, 1, 2)
    tables = tuple(table.to(weight.dtype) for table in (angles.cos(), angles.sin()))
    row = Layout(tiling=tiling([Block(0, n, None)], 0, n))
    inputs: dict[str, Any] = {"position_embeddings": tables, "attention_mask": None, "layout": row}
    try:
        wanted = type(module).forward(module, hidden_states=x, **inputs)[0]
        return torch.equal(attention_forward(module, x, **inputs)[0], wanted)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # a layer of another kind
        return False
