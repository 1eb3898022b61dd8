"""Log-probabilities of given tokens from hidden states, without the [B, T, V] tensor."""

from collections.abc import Callable, Iterator, Sequence
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

    No more numbers than two times `chunk` rows of logits exist at a time, in the forward and the backward
    pass; both outputs come from one pass. The logits and what follows are float32 (float64 for float64
    inputs), autocast off; gradients of a half-precision head are products in its precision, as of any layer.
    Gradients go to hidden, head_weight and bias as far as they require them; the entropy is detached unless
    `differentiable_entropy`. Targets must lie in [0, V): give masked positions any valid id. Once
    differentiable. What the backward pass needs of the log-probabilities is linear in the incoming number
    per token, so with a frozen head it is prepared in the forward pass; with a trained one the slopes [N, V]
    are kept while they are small, and computed again where they are not, or where the entropy is
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
# Of slopes kept from forward to backward: 1,365 tokens of a vocabulary of 49k in bf16.
KEPT_BYTES = 128 * 2**20
BLOCK_ROWS = 1024  # of the head at a time: a few megabytes, in a core's reach; elsewhere eight times that


class _Room:
    """Products with the head, and buffers that are used again for each of them: fresh pages cost as much as
    a pass over them."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
        # CUDA multiplies halves with float32 results by itself; elsewhere the head is cast, block by block.
        self.direct = hidden.device.type == "cuda" and hidden.dtype == weight.dtype != dtype
        self.cast = not self.direct and weight.dtype != dtype
        self.dtype, self.device = dtype, weight.device
        self.block = min(BLOCK_ROWS if hidden.device.type == "cpu" else 8 * BLOCK_ROWS, len(weight)) or 1
        self.held: dict[str, Tensor] = {}

    def of(self, name: str, rows: int, columns: int) -> Tensor:
        """The buffer of that name, [rows, columns] of it, in the working dtype."""
        held = self.held.get(name)
        if held is None or held.numel() < rows * columns:
            held = self.held[name] = torch.empty(rows * columns, dtype=self.dtype, device=self.device)
        return held[: rows * columns].view(rows, columns)

    def blocks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(which rows of the head, the rows as they are multiplied), until all were there."""
        for start in range(0, len(weight), self.block):
            rows = slice(start, min(start + self.block, len(weight)))
            part = weight[rows]
            yield rows, self.of("head", *part.shape).copy_(part) if self.cast else part

    def product(self, hidden: Tensor, block: Tensor) -> Tensor:
        """h·Wᵀ [rows, rows of the block] in the working dtype."""
        if self.direct:
            return torch.mm(hidden, block.t(), out_dtype=torch.float32)
        return torch.mm(hidden, block.t(), out=self.of("logits", len(hidden), len(block)))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        """z/T [rows, V] in the working dtype."""
        if self.direct:
            return _finished(self.product(hidden, weight), bias, settings)
        z, wide = self.of("logits", len(hidden), len(weight)), hidden.to(self.dtype)
        for rows, block in self.blocks(weight):
            torch.mm(wide, block.t(), out=z[:, rows])
        return _finished(z, bias, settings)


def head_logits(
    hidden: Float[Tensor, "N d"], weight: Float[Tensor, "V d"], bias: Float[Tensor, "V"] | None = None
) -> Float[Tensor, "N V"]:
    """h·Wᵀ + b, float32 (float64 for float64 inputs); gradients are products in the head's precision, as of
    any layer. All of [N, V]: for a chunk of rows."""
    apply: Callable[..., Tensor] = _HeadLogits.apply
    return apply(hidden, weight, bias)


class _HeadLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        return _Room(hidden, weight, dtype).logits(
            hidden, weight, bias, _Settings(1.0, 1, None, False, False)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        narrow = slope.to(weight.dtype)
        return (
            (narrow @ weight).to(hidden.dtype) if needs_hidden else None,
            narrow.t() @ hidden.to(weight.dtype) if needs_weight else None,
            slope.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )


def _finished(z: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
    """From h·Wᵀ, in place: + b, capped, over the temperature."""
    if bias is not None:
        z += bias.to(z.dtype)
    if settings.soft_cap is not None:
        z.div_(settings.soft_cap).tanh_().mul_(settings.soft_cap)
    return z if settings.temperature == 1.0 else z.div_(settings.temperature)


def _scores(
    room: _Room,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: _Settings,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, log-probability, entropy), each [N], by one pass over the blocks of the head: no more than the
    logits of one exist at a time. Fills `slopes` [N, V], −T · d logp/d(h·Wᵀ + b), if given.

    When a block brings a larger top t', sums over what came before are moved: with c = e^(t − t'), s becomes
    c·s and a becomes c·(a + s·(t − t')).
    """
    wide = hidden if room.direct else hidden.to(room.dtype)
    top = torch.full_like(wide[:, 0], float("-inf"), dtype=room.dtype)
    total, along = torch.zeros_like(top), torch.zeros_like(top)
    chosen = torch.full_like(top, float("nan"))  # a target outside the head has no logit
    tops = []
    for rows, block in room.blocks(weight):
        z = _finished(room.product(wide, block), None if bias is None else bias[rows], settings)
        cap_slope = None if slopes is None else _cap_slope(z, settings)
        inside = (targets >= rows.start) & (targets < rows.stop)
        mine = z.gather(-1, (targets - rows.start).clamp(0, len(block) - 1).unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(inside, mine, chosen)
        new = torch.maximum(top, z.amax(-1))
        moved = torch.where(total > 0, top - new, 0.0)
        shrink = moved.exp()
        masses = torch.exp(z.sub_(new.unsqueeze(-1)), out=room.of("masses", *z.shape))
        along = shrink * (along + total * moved) + z.mul_(masses).sum(-1)
        total = shrink * total + masses.sum(-1)
        top = new
        if slopes is not None:
            slopes[:, rows] = masses if cap_slope is None else masses.mul_(cap_slope)
            tops.append((rows, new))
    log_total = total.log()
    lse, logprobs = log_total + top, chosen - top - log_total
    if slopes is not None:
        _norm_slopes(slopes, tops, lse, room)
        # p − 1 by way of its logarithm: of a p near 1, rounded to half precision, nothing would be left
        cap_slope, own = _cap_slope(chosen, settings), torch.expm1(logprobs)
        own = own if cap_slope is None else own * cap_slope
        slopes[torch.arange(len(own), device=own.device), targets] = own.to(slopes.dtype)
    return lse, logprobs, log_total - along / total  # H = ln Σe^z − Σ p·z


def _norm_slopes(slopes: Tensor, tops: Sequence[tuple[slice, Tensor]], lse: Tensor, room: _Room) -> None:
    """From e^(z − the top so far) to e^(z − lse), block by block; in half precision rounded a second time."""
    for rows, top in tops:
        part, factor = slopes[:, rows], (top - lse).exp_().unsqueeze(-1)
        if part.dtype == room.dtype:
            part.mul_(factor)
        else:  # torch would cast it into fresh memory
            part.copy_(room.of("masses", *part.shape).copy_(part).mul_(factor))


def _cap_slope(z: Tensor, settings: _Settings) -> Tensor | None:
    """d(c·tanh(u/c))/du = 1 − (z·T/c)², for z capped and over the temperature."""
    if settings.soft_cap is None:
        return None
    return 1 - (z * (settings.temperature / settings.soft_cap)) ** 2


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        count = len(targets)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        room = _Room(hidden, weight, dtype)
        ahead = _prepared_how(ctx, hidden, weight, settings)
        shape = {"hidden": hidden.shape, "kept": (count, len(weight))}.get(ahead)
        prepared = None if shape is None else torch.empty(shape, dtype=weight.dtype, device=weight.device)
        # as many numbers at a time as `chunk` rows of logits have
        step = settings.chunk * max(1, len(weight) // room.block)
        spare = None
        if ahead == "hidden":
            step = settings.chunk
            spare = torch.empty(min(step, count), len(weight), dtype=weight.dtype, device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, step):
                rows = slice(start, start + step)
                some, slopes = hidden[rows], None
                if prepared is not None:
                    slopes = prepared[rows] if spare is None else spare[: len(some)]
                found = _scores(room, some, weight, bias, targets[rows], settings, slopes)
                lse[rows], logprobs[rows], entropy[rows] = found
                if prepared is not None and spare is not None and slopes is not None:
                    torch.mm(slopes, weight, out=prepared[rows])
        ctx.settings, ctx.ahead, ctx.dtype = settings, ahead, dtype
        ctx.add_rows = getattr(weight, "add_gradient_rows", None)
        ctx.hidden_dtype = hidden.dtype
        inputs = (hidden, weight, bias) if ahead != "hidden" else (None,) * 3
        again = (targets, lse, entropy) if ahead == "nothing" else (None,) * 3
        ctx.save_for_backward(*inputs, *again, prepared)
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
    room = _Room(hidden, weight, ctx.dtype)
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
    temperature, cap_slope = settings.temperature, _cap_slope(z, settings)
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
