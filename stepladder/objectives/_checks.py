"""Shared argument checks and the dtype rule of this layer: sums run in at least float32, float64 is kept."""

import math

import torch
from torch import Tensor


def working(tensor: Tensor) -> Tensor:
    """The tensor in the dtype it is summed in: half precisions become float32, float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def require_same_shape(**tensors: Tensor) -> None:
    """Raise unless all tensors have one shape; the message names each of them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {listed}; pass tensors of one shape, for example all [B, T]")


def require_bool(mask: Tensor, name: str = "mask") -> None:
    """Raise unless the mask is boolean: an integer mask would be read as indices, a float one as weights."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} has dtype {mask.dtype}; pass torch.bool, for example {name}.bool()")


def require_positive(**numbers: float) -> None:
    """Raise unless every number is finite and above zero."""
    for name, number in numbers.items():
        if not 0.0 < number < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {number}; for example {name}=0.1")


def require_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Raise if a tensor holds NaN or infinity where the mask is True; elsewhere anything may stand."""
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor) & mask).sum())
        if bad:
            raise ValueError(
                f"{name} has {bad} non-finite value(s) on trained tokens; drop those samples or set "
                f"mask to False there (a missing log-probability must not be trained on)"
            )


def require_all_finite(**tensors: Tensor) -> None:
    """Raise if a tensor holds NaN or infinity anywhere."""
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ValueError(f"{name} has {bad} non-finite value(s); leave those entries out")


def require_finite_number(**numbers: float) -> None:
    """Raise unless every number is finite."""
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number}; for example {name}=0.5")


def require_float(**tensors: Tensor) -> None:
    """Raise for integers: what is returned in their dtype would be cut to integers, often to 0."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; pass floating point, for example {name}.float()"
            )


def require_per_row(like: Tensor, **values: Tensor) -> None:
    """Raise unless each tensor holds one number per row of `like`; a column would broadcast to [B, B]."""
    for name, tensor in values.items():
        if tensor.shape != like.shape[:1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass one number per row, {tuple(like.shape[:1])}"
            )


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def zero_where_masked(mask: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with exact zeros outside the mask, so that NaN or 1e6 in padding reaches no gradient."""
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over True positions, 0 when there are none; detached, for metrics."""
    chosen = zero_where_masked(mask, working(values.detach()))
    return chosen.sum() / mask.sum().clamp(min=1)


def expand_rows(values: Tensor, like: Tensor, name: str) -> Tensor:
    """[B] becomes [B, 1] for broadcasting over tokens; [B, T] passes; anything else raises."""
    if values.shape == like.shape:
        return values
    if values.shape == like.shape[:1]:
        return values.unsqueeze(-1)
    raise ValueError(
        f"{name} has shape {tuple(values.shape)}; pass [B] = {tuple(like.shape[:1])} (one per row) "
        f"or [B, T] = {tuple(like.shape)} (one per token)"
    )
