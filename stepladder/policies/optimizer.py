"""AdamW on fp32 master weights, whatever precision the model computes in.

A bf16 weight of 0.02 does not move by 1e-6 (it has 8 bits of mantissa); an fp32 master does, and the
rounded copies follow: of many such weights, in every step as large a share as keeps their mean right (see
`spread`). Gradients of micro-batches are summed in fp32 too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from stepladder.errors import CheckpointError, ConfigError, InvariantError
from stepladder.objectives.rounding import spread
from stepladder.policies.fast.heap import trim_heap


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training updates, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class MasterOptimizer:
    """AdamW with global-norm clipping. `step(lr)` returns the gradient norm before clipping.

    Raises ConfigError without trainable parameters, InvariantError on a non-finite gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ):
        if not parameters:
            raise ConfigError("no parameter is trainable; unfreeze some, or add a LoRA adapter")
        self.parameters = dict(parameters)
        self.max_grad_norm = max_grad_norm
        self.stepping = False  # inside AdamW's own step: what fails there cannot be made again
        self.masters: dict[str, Tensor] = {}
        self._hooks = []
        rounded = {name: p for name, p in self.parameters.items() if p.dtype != torch.float32}
        copies = _room(rounded)
        self._sums = _room(rounded)  # where gradients are added up, in every step
        for name, p in self.parameters.items():
            if name not in rounded:
                self.masters[name] = p
                continue
            self.masters[name] = spread(copies[name].copy_(p.detach()), p.dtype, name)
            hook = p.register_post_accumulate_grad_hook(self._collector(name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
            p.add_gradient_rows = self._row_adder(name)  # type: ignore[attr-defined]
        # pages given back cost time when they are taken again: it does not pay for what is small anyway
        self._large = sum(p.numel() for p in self.parameters.values()) >= 2**24
        self._moments = _room(self.parameters), _room(self.parameters)
        self.adam = torch.optim.AdamW(
            list(self.masters.values()), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )

    def close(self) -> None:
        """Detach from the model, so that another optimiser can take over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for p in self.parameters.values():
            if hasattr(p, "add_gradient_rows"):
                del p.add_gradient_rows

    def _collector(self, name: str):  # type: ignore[no-untyped-def]
        master = self.masters[name]

        def collect(p: Tensor) -> None:
            if p.grad is None:
                return
            if master.grad is not None:
                master.grad.add_(p.grad)
            else:
                master.grad = self._sums[name].copy_(p.grad)
            p.grad = None

        return collect

    def _row_adder(self, name: str) -> Callable[[Tensor | slice, Tensor], None]:
        """For layers that know some rows of a weight's gradient at a time: the whole of it, of an embedding
        the largest tensor of a step, is then never made besides the sum."""
        master = self.masters[name]

        def add(rows: Tensor | slice, values: Tensor) -> None:
            if master.grad is None:
                master.grad = self._sums[name].zero_()
            if isinstance(rows, slice):
                master.grad[rows].add_(values)
            else:
                master.grad.index_add_(0, rows, values.to(master.dtype))

        return add

    def step(self, lr: float) -> float:
        """One update at learning rate `lr`; clears the gradients."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm))
        if norm != norm or norm in (float("inf"), float("-inf")):
            self.clear()
            raise InvariantError(
                f"the gradient norm is {norm}: a loss or log-probability was not finite. The weights were "
                "not touched; look at the last batch in the run folder, or lower the learning rate"
            )
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.stepping = True
        for name, master in self.masters.items():
            if master.grad is not None and not self.adam.state.get(master):
                first, second = (moments[name].zero_() for moments in self._moments)
                self._set_state(master, torch.zeros((), device=master.device), first, second)
        self.adam.step()
        self.stepping = False
        with torch.no_grad():
            for name, p in self.parameters.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])
        self.clear()
        if self._large:
            trim_heap()
        return norm

    def clear(self) -> None:
        """Drop the gradients, those of a backward pass that was broken off too."""
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def _set_state(self, master: Tensor, step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self.adam.state[master] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    # -- state, as plain tensors for safetensors ------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Masters, moments and step counts, by name; a parameter without gradients so far has no moments."""
        out = {f"master/{name}": t.detach() for name, t in self.masters.items()}
        for name, t in self.masters.items():
            state = self.adam.state.get(t)
            if state:
                out[f"exp_avg/{name}"] = state["exp_avg"]
                out[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
                out[f"step/{name}"] = state["step"].reshape(1)
        return out

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state, weights included. Raises CheckpointError on missing names or shapes."""
        for name, master in self.masters.items():
            saved = tensors.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                got = "nothing" if saved is None else f"shape {tuple(saved.shape)}"
                raise CheckpointError(
                    f"the checkpoint holds {got} for {name!r}, the model needs {tuple(master.shape)}; "
                    "resume with the recipe that made the checkpoint"
                )
            master.copy_(saved)
            if f"exp_avg/{name}" in tensors:
                first = self._moments[0][name].copy_(tensors[f"exp_avg/{name}"])
                second = self._moments[1][name].copy_(tensors[f"exp_avg_sq/{name}"])
                self._set_state(master, tensors[f"step/{name}"].clone().reshape(()), first, second)
            p = self.parameters[name]
            if p is not master:
                p.copy_(master)


def _room(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialised float32 tensors in the shapes of `parameters`, all in one piece of memory a device: what
    lives as long as the run shall not lie between what comes and goes with each step, and waste the gaps."""
    out: dict[str, Tensor] = {}
    for device in {p.device for p in parameters.values()}:
        here = {name: p for name, p in parameters.items() if p.device == device}
        flat = torch.empty(sum(p.numel() for p in here.values()), dtype=torch.float32, device=device)
        parts = torch.split(flat, [p.numel() for p in here.values()])
        out |= {name: part.view(p.shape) for (name, p), part in zip(here.items(), parts, strict=True)}
    return out


def warmup_then_constant(step: int, *, peak: float, warmup: int) -> float:
    """Linear warm-up over `warmup` steps (step 0 gets peak/warmup), then constant."""
    return peak * min(1.0, (step + 1) / max(1, warmup))


def warmup_then_linear(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up to the peak, then linear decay that reaches exactly 0 at the last of `total` steps.

    All are optimiser steps, counted from 0. Raises ConfigError where the warm-up leaves no room for it.
    """
    if total <= max(1, warmup):
        raise ConfigError(
            f"a warm-up of {warmup} steps leaves no decay in {total} steps; try warmup={max(0, total // 10)}"
            f"{' and at least 2 steps' if total < 2 else ''}"
        )
    if step < warmup:
        return peak * (step + 1) / warmup
    first = max(warmup - 1, 0)  # the step that has the peak
    return peak * max(0.0, (total - 1 - step) / (total - 1 - first))
