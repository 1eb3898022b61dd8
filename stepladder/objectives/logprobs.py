"""Log-probabilities of given tokens from hidden states, without the [B, T, V] tensor."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._checks import require_all_finite, require_bool, require_positive, require_same_shape, working


def next_token_targets(
    token_ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, segment_ids: Int[Tensor, "B T"] | None = None
) -> tuple[Int[Tensor, "B T-1"], Bool[Tensor, "B T-1"]]:
    """(targets, target mask) [B, T−1]: position t of the model's output scores token t+1. The one place
    that shifts.

    `mask` speaks of tokens (True: trained) and is shifted together with them. In a packed row `segment_ids`
    numbers the documents; the first token of each is no target, for nothing of its own document precedes
    it."""
    require_same_shape(token_ids=token_ids, mask=mask)
    require_bool(mask)
    targets, target_mask = token_ids[:, 1:], mask[:, 1:]
    if segment_ids is not None:
        require_same_shape(token_ids=token_ids, segment_ids=segment_ids)
        target_mask = target_mask & (segment_ids[:, 1:] == segment_ids[:, :-1])
    return targets, target_mask


def full_logprobs(
    logits: Float[Tensor, "*N V"], targets: Int[Tensor, "*N"], *, temperature: float = 1.0
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    """(log softmax(z/T)[target], entropy) in nats from full logits, at least float32; the plain form for
    small V.

    Temperature divides the logits, not the log-probability (that would not be normalised). Entropy is
    differentiable; a forbidden token (logit −∞) adds 0 to it."""
    require_positive(temperature=temperature)
    logp = torch.log_softmax(working(logits) / temperature, dim=-1)
    chosen = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    forbidden = logp.numel() > 0 and bool(torch.isneginf(logp.detach().amin()))
    # another tensor of this size only where it is needed
    possible = logp.masked_fill(torch.isneginf(logp), 0.0) if forbidden else logp
    return chosen, -(logp.exp() * possible).sum(-1)


def chunked_logprobs(
    hidden: Float[Tensor, "N d"],
    head_weight: Float[Tensor, "V d"],
    targets: Int[Tensor, "N"],
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    bias: Float[Tensor, "V"] | None = None,
    soft_cap: float | None = None,
    differentiable_entropy: bool = False,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """(log softmax(z/T)[target], entropy) [N] in nats, with z = h·Wᵀ + b, or c·tanh(that/c) with a soft cap
    c.

    At most `chunk` rows of logits exist at a time, in the forward and the backward pass; both outputs come
    from one pass. Everything after the matrix product runs in float32 (float64 for float64 inputs),
    autocast off. Gradients go to hidden, head_weight and bias as far as they require them; the entropy is
    detached unless `differentiable_entropy`. Targets must lie in [0, V): give masked positions any valid
    id. With a frozen head the gradient for hidden is prepared in the forward pass (it is linear in the
    incoming number per token); with a trained head the logits are computed again in the backward pass. Once
    differentiable."""
    require_positive(temperature=temperature, chunk=chunk)
    if soft_cap is not None:
        require_positive(soft_cap=soft_cap)
    fits = hidden.dim() == 2 and hidden.shape[-1] == head_weight.shape[-1]
    if not fits or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)}, "
            f"targets {tuple(targets.shape)}; pass [N, d], [V, d], [N]"
        )
    if targets.device.type == "cpu" and targets.numel():
        least, most = int(targets.min()), int(targets.max())
        if least < 0 or most >= head_weight.shape[0]:
            raise ValueError(
                f"targets span {least} to {most} but the head has {head_weight.shape[0]} rows; "
                "replace ignored targets (such as -100) by 0 and mask them"
            )
    if bias is not None and bias.device.type == "cpu":
        require_all_finite(bias=bias.detach())
    settings = (float(temperature), int(chunk), soft_cap, differentiable_entropy)
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    logprobs, entropy = apply(hidden, head_weight, bias, targets, settings)
    return logprobs, entropy


_Settings = tuple[float, int, float | None, bool]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings, buffer: Tensor | None
) -> Tensor:
    """z/T [rows, V] in the working dtype, written into `buffer` if there is one."""
    if buffer is None:
        z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        z = torch.mm(hidden.to(weight.dtype), weight.t(), out=buffer[: len(hidden)])
    if bias is not None:
        z += bias.to(z.dtype)
    temperature, _, soft_cap, _ = settings
    if soft_cap is not None:
        z.div_(soft_cap).tanh_().mul_(soft_cap)
    return z if temperature == 1.0 else z.div_(temperature)


def _buffer(count: int, settings: _Settings, head: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for one chunk of logits, used again for every chunk: fresh pages cost as much as a pass over
    them."""
    return torch.empty(min(settings[1], count), len(head), dtype=dtype, device=head.device)


def _working_weight(hidden: Tensor, weight: Tensor) -> Tensor:
    """CUDA multiplies half precision with float32 results by itself; elsewhere the head is cast once per
    call."""
    if hidden.device.type == "cuda" and hidden.dtype == weight.dtype:
        return weight
    return weight.to(torch.promote_types(hidden.dtype, torch.promote_types(weight.dtype, torch.float32)))


def _expectation(masses: Tensor, total: Tensor, head: Tensor) -> Tensor:
    if head.dtype == masses.dtype:
        return (masses @ head) / total
    return (masses / total).to(head.dtype) @ head


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        head = _working_weight(hidden, weight)
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        count = len(targets)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        prepare = needs_hidden and not (needs_weight or needs_bias or settings[3] or settings[2])
        slopes = torch.empty_like(hidden, dtype=dtype) if prepare else None
        room = _buffer(count, settings, head, dtype) if head.dtype == dtype else None
        masses = _buffer(count, settings, head, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, settings[1]):
                rows = slice(start, start + settings[1])
                z = _logits(hidden[rows], head, bias, settings, room)
                top = z.amax(-1, keepdim=True)
                z.sub_(top)
                p = torch.exp(z, out=masses[: len(z)])
                total = p.sum(-1)
                log_total = total.log()
                lse[rows] = log_total + top.squeeze(-1)
                logprobs[rows] = z.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - log_total
                # H = ln Σe^z − Σ p·z, with p not yet divided by its total
                entropy[rows] = log_total - torch.linalg.vecdot(p, z) / total
                if slopes is not None:
                    # ∂lp/∂h = (W[target] − Σ_v p_v·W_v) / T; masses are divided first where halves overflow
                    expected = _expectation(p, total.unsqueeze(-1), head)
                    slopes[rows] = (head[targets[rows]].to(dtype) - expected.to(dtype)) / settings[0]
        ctx.settings = settings
        ctx.prepared = prepare
        saved = (slopes,) if prepare else (hidden, weight, bias, targets, lse, entropy)
        ctx.save_for_backward(*saved)
        ctx.input_dtypes = (hidden.dtype, weight.dtype)
        if not settings[3]:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.prepared:
            (slopes,) = ctx.saved_tensors
            grad = (slopes * grad_logprobs.unsqueeze(-1)).to(ctx.input_dtypes[0])
            return grad, None, None, None, None
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = _working_weight(hidden, weight)
        settings: _Settings = ctx.settings
        chunk = settings[1]
        room = _buffer(len(targets), settings, head, lse.dtype) if head.dtype == lse.dtype else None
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=lse.dtype) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(targets), chunk):
                rows = slice(start, start + chunk)
                z = _logits(hidden[rows], head, bias, settings, room)
                slope = _logit_slopes(
                    z,
                    targets[rows],
                    lse[rows],
                    entropy[rows],
                    grad_logprobs[rows],
                    grad_entropy[rows],
                    settings,
                )
                if grad_hidden is not None:
                    grad_hidden[rows] = (slope.to(head.dtype) @ head).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(slope.t(), hidden[rows].to(slope.dtype))
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _logit_slopes(
    z: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    settings: _Settings,
) -> Tensor:
    """dL/d(h·Wᵀ + b) [chunk, V], from z = the logits after cap and temperature (overwritten)."""
    temperature, _, soft_cap, with_entropy = settings
    # d(c·tanh(u/c))/du = 1 − (z·T/c)²
    cap_slope = None if soft_cap is None else 1 - (z * (temperature / soft_cap)) ** 2
    logp = z.sub_(lse.unsqueeze(-1))
    if with_entropy:
        # dH/dz_v = −p_v·(ln p_v + H)
        p = logp.exp()
        slope = -p * (
            grad_entropy.unsqueeze(-1) * (logp + entropy.unsqueeze(-1)) + grad_logprobs.unsqueeze(-1)
        )
    else:
        slope = logp.exp_().mul_(-grad_logprobs.unsqueeze(-1))
    slope.scatter_add_(-1, targets.unsqueeze(-1), grad_logprobs.unsqueeze(-1).to(slope.dtype))
    if cap_slope is not None:
        slope.mul_(cap_slope)
    return slope if temperature == 1.0 else slope.div_(temperature)
