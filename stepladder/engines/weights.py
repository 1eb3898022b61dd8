"""The engine's view of the policy: which module computes, in which type, and what its weights are."""

from __future__ import annotations

import copy
import hashlib
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepladder.errors import ConfigError


def causal_model(policy: Any) -> Any:
    """The causal LM inside a PEFT wrapper (its adapters act in place), or the model itself.

    Raises:
        ConfigError: a prompt-learning adapter, which adds virtual tokens that the cache would not see.
    """
    if not hasattr(policy, "get_base_model"):
        return policy
    if getattr(policy.active_peft_config, "is_prompt_learning", False):
        raise ConfigError(
            f"the engine cannot run the {policy.active_peft_config.peft_type} adapter: it adds virtual "
            "tokens; use LoRA"
        )
    return policy.get_base_model()


class PolicyView:
    """The policy itself, or a copy of it in another type or on another device, refreshed at every sync.

    `private` asks for a copy in any case: for tokens that are sampled while the policy is being updated.
    """

    def __init__(
        self,
        policy: Any,
        device: torch.device | None,
        dtype: torch.dtype | None,
        *,
        private: bool = False,
    ) -> None:
        self.policy = causal_model(policy)
        first = next(self.policy.parameters())
        self.device, self.dtype = device or first.device, dtype or first.dtype
        self.model = self.policy
        self._asked, self._private = dtype, private

    def copy_if_needed(self) -> None:
        """Make the copy that the default path computes with; the fused path needs none."""
        dtype = self._asked
        if (
            self._private
            or any(p.device != self.device for p in self.policy.parameters())
            or (
                dtype is not None
                and any(p.dtype != dtype for p in self.policy.parameters() if p.is_floating_point())
            )
        ):
            self.model = self._copy()

    def _copy(self) -> Any:
        """Parameters in the engine's type; buffers (rotary frequencies) keep theirs."""
        model = copy.deepcopy(self.policy).to(self.device)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        return model

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the policy's present weights."""
        if self.model is not self.policy:
            for mine, theirs in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(theirs)
            for mine, theirs in zip(self.model.buffers(), self.policy.buffers(), strict=True):
                mine.copy_(theirs)

    def fingerprint(self) -> str:
        """Changes with any bit of any weight that the engine computes with."""
        seen = WeightHash()
        for parameter in self.model.parameters():
            seen.add(parameter)
        return seen.digest()


class WeightHash:
    """A hash of tensors: of each, the sum of its bytes as 64-bit words (mod 2⁶⁴) and a sample of them.

    One changed element changes the sum for certain; the sample tells permutations apart. It reads at the
    speed of memory, which a cryptographic hash of all bytes does not.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, tensor: Tensor) -> None:
        """Take in one tensor; the order matters."""
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        words = bits[: bits.numel() // 8 * 8].view(torch.int64)
        step = max(1, words.numel() // 128)
        self._digest.update(str((tuple(tensor.shape), str(tensor.dtype), int(words.sum()))).encode())
        self._digest.update(words[::step].cpu().numpy().tobytes())
        self._digest.update(bits[words.numel() * 8 :].cpu().numpy().tobytes())

    def digest(self) -> str:
        """The hash so far, as text."""
        return self._digest.hexdigest()


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """None stays None (the policy's own type); "auto" is bf16 where the machine is measured to gain by it.

    Raises:
        ConfigError: neither a floating type nor "auto".
    """
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
        return torch.bfloat16 if device.type == "cpu" and _bf16_pays() else None
    if isinstance(dtype, str):
        found: Any = getattr(torch, dtype, None)
        dtype = found if isinstance(found, torch.dtype) else torch.int8
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating type, 'auto' or None; got {dtype!r}; try 'bfloat16'")
    return dtype


def _bf16_pays(rows: int = 32, size: int = 768) -> bool:
    """The CPU has bf16 instructions, and a product of a decode step's shape is faster with them."""
    has = any(
        getattr(torch.cpu, name, lambda: False)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return has and _product_seconds(torch.bfloat16, rows, size) < _product_seconds(torch.float32, rows, size)


def _product_seconds(dtype: torch.dtype, rows: int, size: int) -> float:
    x, w = torch.ones(rows, size, dtype=dtype), torch.ones(4 * size, size, dtype=dtype)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        F.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return best
