"""Log-probabilities of given tokens from hidden states, without the [B, T, V] tensor."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    from one pass. The logits and what follows are float32 (float64 for float64 inputs), autocast off;
    gradients of a half-precision head are products in its precision, as of any layer. Gradients go to
    hidden, head_weight and bias as far as they require them; the entropy is detached unless
    `differentiable_entropy`. Targets must lie in [0, V): give masked positions any valid id. Once
    differentiable. What the backward pass needs is linear in the incoming number per token, so with a
    frozen head it is prepared in the forward pass; with a trained one the slopes [N, V] are kept while they
    are small, and computed again where they are not."""
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
    pieces = max(1, -(-len(targets) // int(chunk)))
    rows = -(-len(targets) // pieces) or 1
    settings = _Settings(float(temperature), rows, soft_cap, differentiable_entropy, torch.is_grad_enabled())
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    logprobs, entropy = apply(hidden, head_weight, bias, targets, settings)
    return logprobs, entropy


class _Settings(NamedTuple):
    temperature: float
    chunk: int  # rows of logits at a time
    soft_cap: float | None
    with_entropy: bool  # is it differentiable
    gradients: bool  # are any wanted at all: autograd asks a Function in the same way where it is off


AddRows = Callable[[Tensor | slice, Tensor], None]
KEPT_BYTES = (
    128 * 2**20
)  # of slopes kept from forward to backward: 1,365 tokens of a vocabulary of 49k in bf16
BLOCK_ROWS = 1024  # of a half-precision head in float32 at a time: a few megabytes, which stay in the cache


class _Room:
    """Buffers for one chunk, used again for every chunk: fresh pages cost as much as a pass over them."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, rows: int) -> None:
        # CUDA multiplies halves with float32 results by itself; elsewhere the head is cast, block by block.
        self.direct = hidden.device.type == "cuda" and hidden.dtype == weight.dtype != dtype
        self.cast = not self.direct and weight.dtype != dtype
        self.shape, self.dtype = (min(rows, len(hidden)), len(weight)), dtype
        self.z: Tensor | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        """z/T [rows, V] in the working dtype."""
        if self.direct:
            z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:
            if self.z is None:
                self.z = torch.empty(self.shape, dtype=self.dtype, device=weight.device)
            z = self.z[: len(hidden)]
            wide = hidden.to(z.dtype)
            for start, block in self.blocks(weight):
                torch.mm(wide, block.t(), out=z[:, start : start + len(block)])
        return _finished(z, bias, settings)

    def blocks(self, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(its first row, some rows of the head in the working dtype), until all rows were there."""
        if not self.cast:
            yield 0, weight
            return
        shape = min(BLOCK_ROWS, len(weight)), weight.shape[1]
        room = torch.empty(shape, dtype=self.dtype, device=weight.device)
        for start in range(0, len(weight), BLOCK_ROWS):
            part = weight[start : start + BLOCK_ROWS]
            yield start, room[: len(part)].copy_(part)


def _finished(z: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
    """From h·Wᵀ, in place: + b, capped, over the temperature."""
    if bias is not None:
        z += bias.to(z.dtype)
    if settings.soft_cap is not None:
        z.div_(settings.soft_cap).tanh_().mul_(settings.soft_cap)
    return z if settings.temperature == 1.0 else z.div_(settings.temperature)


def _sums_by_block(
    room: _Room, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top, Σ_v e^(z − top), Σ_v e^(z − top)·(z − top), z of the target − top), each [N], for a head that is
    cast: each block is cast once for all rows, and no more than its logits exist at a time.

    When a block brings a larger top t', sums over what came before are moved: with c = e^(t − t'), s becomes
    c·s and a becomes c·(a + s·(t − t')).
    """
    wide = hidden.to(room.dtype)
    top = torch.full_like(wide[:, 0], float("-inf"))
    total, along, chosen = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    for start, block in room.blocks(weight):
        part = slice(start, start + len(block))
        z = _finished(wide @ block.t(), None if bias is None else bias[part], settings)
        inside = (targets >= start) & (targets < start + len(block))
        mine = z.gather(-1, (targets - start).clamp(0, len(block) - 1).unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(inside, mine, chosen)
        new = torch.maximum(top, z.amax(-1))
        moved = torch.where(total > 0, top - new, 0.0)
        shrink = moved.exp()
        masses = z.sub_(new.unsqueeze(-1)).exp()
        along = shrink * (along + total * moved) + torch.linalg.vecdot(masses, z)
        total = shrink * total + masses.sum(-1)
        top = new
    return top, total, along, chosen - top


def _sums(z: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ_v e^z, Σ_v e^z·z) of every row, some columns at a time."""
    total, along = torch.zeros_like(z[:, 0]), torch.zeros_like(z[:, 0])
    for part in torch.split(z, BLOCK_ROWS, dim=-1):
        masses = part.exp()
        total += masses.sum(-1)
        along += torch.linalg.vecdot(masses, part)
    return total, along


def _slopes(z: Tensor, targets: Tensor, lse: Tensor, top: Tensor, settings: _Settings) -> Tensor:
    """−T · d logp/d(h·Wᵀ + b) [rows, V], in place of z = capped logits / T − top."""
    temperature, soft_cap = settings.temperature, settings.soft_cap
    # d(c·tanh(u/c))/du = 1 − (z·T/c)²
    cap_slope = None if soft_cap is None else 1 - ((z + top) * (temperature / soft_cap)) ** 2
    p = z.sub_(lse.unsqueeze(-1) - top).exp_()
    p.scatter_add_(-1, targets.unsqueeze(-1), p.new_full((len(p), 1), -1.0))
    return p if cap_slope is None else p.mul_(cap_slope)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        count = len(targets)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        room = _Room(hidden, weight, dtype, settings.chunk)
        ahead = _prepared_how(ctx, hidden, weight, settings)
        shape = {"hidden": hidden.shape, "kept": (count, len(weight))}.get(ahead)
        prepared = None if shape is None else torch.empty(shape, dtype=weight.dtype, device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            by_block = prepared is None and room.cast
            # as many numbers at a time as `chunk` rows of logits have
            step = settings.chunk * max(1, len(weight) // BLOCK_ROWS if by_block else 1)
            for start in range(0, count, step):
                rows = slice(start, start + step)
                if by_block:
                    top, total, along, chosen = _sums_by_block(
                        room, hidden[rows], weight, bias, targets[rows], settings
                    )
                    log_total = total.log()
                    lse[rows], logprobs[rows] = log_total + top, chosen - log_total
                    entropy[rows] = log_total - along / total
                    continue
                z = room.logits(hidden[rows], weight, bias, settings)
                top = z.amax(-1, keepdim=True)
                total, along = _sums(z.sub_(top))
                log_total = total.log()
                lse[rows] = log_total + top.squeeze(-1)
                logprobs[rows] = z.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - log_total
                entropy[rows] = log_total - along / total  # H = ln Σe^z − Σ p·z
                if prepared is not None:
                    slopes = _slopes(z, targets[rows], lse[rows], top, settings)
                    prepared[rows] = slopes if ahead == "kept" else slopes.to(weight.dtype) @ weight
        ctx.settings, ctx.ahead, ctx.dtype = settings, ahead, dtype
        ctx.add_rows = getattr(weight, "add_gradient_rows", None)
        ctx.hidden_dtype = hidden.dtype
        inputs = (None,) * 6 if ahead == "hidden" else (hidden, weight, bias, targets, lse, entropy)
        ctx.save_for_backward(*inputs, prepared)
        if not settings.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, _, _, _, prepared = ctx.saved_tensors
        with torch.autocast(grad_logprobs.device.type, enabled=False):
            if prepared is None:
                return (*_gradients_anew(ctx, grad_logprobs, grad_entropy), None, None)
            scale = (-grad_logprobs / ctx.settings.temperature).unsqueeze(-1)
            if ctx.ahead == "hidden":
                return (prepared * scale).to(ctx.hidden_dtype), None, None, None, None
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            to_hidden = ((prepared @ weight) * scale).to(hidden.dtype) if needs_hidden else None
            to_weight = None
            if needs_weight:
                to_weight = _weight_gradient(prepared, (hidden * scale).to(weight.dtype), ctx.add_rows)
            to_bias = (scale.to(weight.dtype).t() @ prepared)[0].to(bias.dtype) if needs_bias else None
        return to_hidden, to_weight, to_bias, None, None


def _weight_gradient(slopes: Tensor, hidden: Tensor, add_rows: AddRows | None) -> Tensor | None:
    """slopesᵀ · hidden [V, d]; None where it went to `add_rows`, some rows at a time."""
    if add_rows is None:
        return slopes.t() @ hidden
    for start in range(0, slopes.shape[1], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        add_rows(rows, slopes[:, rows].t() @ hidden)
    return None


def _handed_over(gradient: Tensor, weight: Tensor, add_rows: AddRows | None) -> Tensor | None:
    if add_rows is None:
        return gradient.to(weight.dtype)
    add_rows(slice(None), gradient)
    return None


def _prepared_how(ctx: Any, hidden: Tensor, weight: Tensor, settings: _Settings) -> str:
    """What the forward pass prepares: "hidden" (its gradient), "kept" (the slopes), or "nothing"."""
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if settings.with_entropy or not settings.gradients or not (needs_hidden or needs_weight or needs_bias):
        return "nothing"
    if not (needs_weight or needs_bias):
        return "hidden"
    return "kept" if len(hidden) * len(weight) * weight.element_size() <= KEPT_BYTES else "nothing"


def _gradients_anew(
    ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients for hidden, weight and bias, from logits computed a second time."""
    hidden, weight, bias, targets, lse, entropy, _ = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    settings: _Settings = ctx.settings
    room = _Room(hidden, weight, ctx.dtype, settings.chunk)
    to_hidden = torch.empty_like(hidden) if needs_hidden else None
    to_weight = torch.zeros_like(weight, dtype=ctx.dtype) if needs_weight else None
    to_bias = torch.zeros_like(weight[:, 0], dtype=ctx.dtype) if needs_bias else None
    for start in range(0, len(targets), settings.chunk):
        rows = slice(start, start + settings.chunk)
        z = room.logits(hidden[rows], weight, bias, settings)
        wanted = (targets[rows], lse[rows], entropy[rows], grad_logprobs[rows], grad_entropy[rows])
        slope = _logit_slopes(z, *wanted, settings)
        if to_hidden is not None:
            to_hidden[rows] = (slope.to(weight.dtype) @ weight).to(hidden.dtype)
        if to_weight is not None:
            to_weight.addmm_(slope.t(), hidden[rows].to(slope.dtype))
        if to_bias is not None:
            to_bias += slope.sum(0)
    return (
        to_hidden,
        None if to_weight is None else _handed_over(to_weight, weight, ctx.add_rows),
        None if to_bias is None else to_bias.to(bias.dtype),
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
    temperature, soft_cap = settings.temperature, settings.soft_cap
    # d(c·tanh(u/c))/du = 1 − (z·T/c)²
    cap_slope = None if soft_cap is None else 1 - (z * (temperature / soft_cap)) ** 2
    logp = z.sub_(lse.unsqueeze(-1))
    if settings.with_entropy:
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
