"""What torch.compile would gain on this machine: the engine's step, and the parts of a layer that are no
matrix products.

    python bench/compiled.py [--model FOLDER]

The engine multiplies with packed weights, by operators that the compiler does not know; so a compiled step
multiplies with plain ones, and both are measured. Seconds of the first call, compilation included, stand
beside. The library does not use torch.compile: see docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import about, median_within, model_folder, parser, timed
from torch import Tensor

import stepladder.engines.local.fused as fused
from stepladder.engines.local.packing import PlainLinear, linear_class
from stepladder.policies.fast.lean_attention import _turned
from stepladder.policies.pretrained import load_model

SIZES = (1, 8, 32, 64)
CONTEXT = 90  # tokens before the step
TOKENS = 1024  # of a training row
ADDCMUL = torch.addcmul


def milliseconds(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    return 1000 * median_within(lambda: timed(work), 15, 5.0)


def traceable_addcmul(
    a: Tensor, b: Tensor, c: Tensor, *, value: float = 1, out: Tensor | None = None
) -> Tensor:
    """The compiler gives up a whole step at an `out` that is not dense."""
    found = ADDCMUL(a, b, c, value=value)
    return found if out is None else out.copy_(found)


def step(forward: Any, rows: int, *, compiled: bool) -> list[float]:
    """Milliseconds of one token for each row; compiled, also the seconds of the first call."""
    forward.clear()
    forward.reserve(rows, CONTEXT + 1)
    layout = forward.layout([1] * rows, [CONTEXT] * rows, 0)
    ids = torch.full((layout.filled,), 5)
    if not compiled:
        return [milliseconds(lambda: forward.compute(ids, layout, None))]
    torch._dynamo.reset()
    torch.addcmul = traceable_addcmul
    seen = torch._dynamo.explain(forward.compute)(ids, layout, None)
    if seen.graph_count != 1:
        raise SystemExit(f"the step was not compiled in one piece: {seen.break_reasons}")
    torch._dynamo.reset()
    quick = torch.compile(forward.compute, dynamic=False)
    first = timed(lambda: quick(ids, layout, None))
    found = [milliseconds(lambda: quick(ids, layout, None)), first]
    torch.addcmul = ADDCMUL
    return found


def steps(folder: str) -> list[str]:
    """A line a batch size."""
    from stepladder.engines.local.engine import LocalEngine

    model, _ = load_model(folder, dtype="bfloat16", device="cpu")
    found: dict[int, list[float]] = {rows: [] for rows in SIZES}
    for kind in (linear_class, lambda device, dtype: PlainLinear):
        fused.linear_class = kind  # type: ignore[assignment]
        forward = LocalEngine(model, fused=True)._path.forward
        for rows in SIZES:
            found[rows] += step(forward, rows, compiled=False)
            found[rows] += step(forward, rows, compiled=True) if kind is not linear_class else []
    lines = [
        "| rows | packed products, ms | plain | plain, compiled | first call, s |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {n} | {a:.1f} | {b:.1f} | {c:.1f} | {s:.0f} |" for n, (a, b, c, s) in found.items()]


def parts(tokens: int, width: int, inner: int) -> list[str]:
    """The pieces of a training layer between its products, forward and backward, as they are and compiled."""
    kind = torch.bfloat16
    x, grad = (torch.randn(tokens, width).to(kind) for _ in range(2))
    gate, up, slope = (torch.randn(tokens, inner).to(kind) for _ in range(3))
    weight = torch.randn(width).to(kind)
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    heads, table = torch.randn(tokens, width // 64, 64).to(kind), torch.randn(tokens, 1, 64).to(kind)

    def norm() -> Tensor:
        wide = x.float()
        return weight * wide.mul_(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(kind)

    def norm_back() -> Tensor:
        normal, flat = x.float() * scale, (grad * weight).float()
        along = (flat * normal).mean(-1, keepdim=True)
        return flat.sub_(normal.mul_(along)).mul_(scale).to(kind)

    def gated() -> Tensor:
        return F.silu(gate).mul_(up)

    def gated_back() -> tuple[Tensor, ...]:
        active = F.silu(gate)
        return active * up, torch.ops.aten.silu_backward(slope * up, gate), active.mul_(slope)

    def turned() -> Tensor:
        return _turned(heads, table, table)

    lines = ["| part of a layer | as it is, ms | compiled | first call, s |", "|---|---|---|---|"]
    for name, work in {
        "RMS norm": norm,
        "its gradient": norm_back,
        "silu(gate) · up": gated,
        "its gradients": gated_back,
        "rotation": turned,
    }.items():
        torch._dynamo.reset()
        quick = torch.compile(work)
        first = timed(quick)
        lines.append(f"| {name} | {milliseconds(work):.2f} | {milliseconds(quick):.2f} | {first:.1f} |")
    return lines


def main() -> None:
    options = parser(__doc__).parse_args()
    folder = model_folder(options.model)
    text = [
        "# What torch.compile would gain",
        "",
        about(),
        "",
        f"One token for each row after {CONTEXT} others, bfloat16:",
        "",
    ]
    with torch.no_grad():
        text += steps(str(folder))
        text += ["", f"A row of {TOKENS} tokens, medians:", "", *parts(TOKENS, 576, 1536)]
    (options.out / "compiled.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
