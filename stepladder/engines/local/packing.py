"""Matrix products on weights laid out once for the machine, and what a linear layer's weight really is.

oneDNN multiplies faster with weights in its own blocked layout, and can add a residual or apply SiLU on
the way out. The operators are private to torch: they are tried at start, and plain `F.linear` stands in
where they are absent or wrong.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder.objectives.rounding import changed

# What a model or a kernel raises when it is used in a way that it does not know.
UNSUPPORTED = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)
PACKED_FOR = 32  # rows that the blocked layout is chosen for; other counts work too


class Linear(Protocol):
    """y = x Wᵀ + b for x [n, d_in], and three variants that fuse what follows it."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, other: Tensor) -> Tensor: ...

    def mul(self, x: Tensor, other: Tensor) -> Tensor: ...


class PlainLinear:
    """`F.linear` on the weight as given."""

    copies: ClassVar[bool] = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.weight, self.bias), inplace=True)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(other)

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).mul_(other)


class OneDnnLinear:
    """The same on a weight in oneDNN's blocked layout (CPU only); the layout is a copy."""

    copies: ClassVar[bool] = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops: Any = torch.ops.mkldnn
        self._apply = ops._linear_pointwise
        self._combine = ops._linear_pointwise.binary
        self.weight, self.bias = ops._reorder_linear_weight(weight.contiguous(), PACKED_FOR), bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._apply(x, self.weight, self.bias, "none", [], "")
        return out

    def silu(self, x: Tensor) -> Tensor:
        out: Tensor = self._apply(x, self.weight, self.bias, "swish", [], "")
        return out

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self._combine(x, other, self.weight, self.bias, "add")
        return out

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self._combine(x, other, self.weight, self.bias, "mul")
        return out


def linear_class(device: torch.device, dtype: torch.dtype) -> type[PlainLinear] | type[OneDnnLinear]:
    """`OneDnnLinear` where its operators exist and give what `F.linear` gives, else `PlainLinear`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return PlainLinear
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, other = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((80, 48), (80,), (5, 48), (5, 80))
    )
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    try:
        for b in (None, bias):
            fast, plain = OneDnnLinear(weight, b), PlainLinear(weight, b)
            pairs = [
                (fast(x), plain(x)),
                (fast.silu(x), plain.silu(x)),
                (fast.add(x, other), plain.add(x, other)),
                (fast.mul(x, other), plain.mul(x, other)),
            ]
            if not all(torch.allclose(a, c, atol=tolerance, rtol=tolerance) for a, c in pairs):
                return PlainLinear
    except UNSUPPORTED:
        return PlainLinear
    return OneDnnLinear


def why_not_linear(module: nn.Module) -> str | None:
    """Why the weight of `module` cannot be written as one matrix; None where it can."""
    if type(module) is nn.Linear:
        return None
    if not hasattr(module, "lora_A") or type(module.base_layer) is not nn.Linear:
        return f"a layer is a {type(module).__name__}"
    if any(getattr(module, "use_dora", {}).values()):
        return "its adapter uses DoRA"
    if any(getattr(module, "lora_bias", {}).values()):
        return "its adapter has biases"
    return None


def effective_weight(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer as it acts: base + scale · B A for a LoRA layer, out of place.

    LoRA: Hu et al. 2021 (arXiv 2106.09685), equation 3. The base weight is never written to. In half
    precision a small adapter moves a share of the weights (`changed`), instead of none.
    """
    if not hasattr(module, "lora_A"):
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    base = module.base_layer
    weight = base.weight.detach()
    if not module.disable_adapters and not module.merged:
        acting = [name for name in module.active_adapters if name in module.lora_A]
        if acting:
            weight = changed(weight, sum(module.get_delta_weight(name).detach() for name in acting))
    return weight, None if base.bias is None else base.bias.detach()
