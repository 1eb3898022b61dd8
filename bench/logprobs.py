"""Peak extra memory and time of the chunked log-probabilities against full logits, forward and backward.

    python bench/logprobs.py [--tokens 8192] [--vocabulary 49152] [--width 576] [--out
    bench/results/logprobs.txt]

Each side runs in a process of its own, so that the peak resident memory of one does not hide in the
other's; the memory before the pass is subtracted. Sides alternate in one run and the fastest of the repeats
counts. The full side is what a trainer writes without care for memory: logits, log_softmax, gather, entropy
from the same tensor. Once with a trained head, once with a frozen one. Time is judged in processor seconds,
which a busy machine disturbs less than the clock; with one thread on an idle machine the two are the same.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SIDES = ("full", "chunked")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(
    side: str, tokens: int, vocabulary: int, width: int, chunk: int, frozen: bool
) -> dict[str, float]:
    """One pass in this process: seconds and peak extra bytes."""
    import torch

    from stepladder.objectives.logprobs import chunked_logprobs, full_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = (torch.randn(vocabulary, width) / width**0.5).requires_grad_(not frozen)
    targets = torch.randint(0, vocabulary, (tokens,))
    warm, warm_head = torch.randn(64, width, requires_grad=True), head[:512].detach().clone()
    chunked_logprobs(warm, warm_head, targets[:64] % 512)[0].sum().backward()
    before, started, work = peak_bytes(), time.perf_counter(), time.process_time()
    if side == "chunked":
        logprobs, entropy = chunked_logprobs(hidden, head, targets, chunk=chunk)
    else:
        logprobs, entropy = full_logprobs(hidden @ head.t(), targets)
        entropy = entropy.detach()
    logprobs.sum().backward()
    seconds, work = time.perf_counter() - started, time.process_time() - work
    return {
        "seconds": seconds,
        "work": work,
        "bytes": peak_bytes() - before,
        "check": float(logprobs.detach().double().mean() + entropy.double().mean()),
        "slope": float(hidden.grad.double().norm()),  # type: ignore[union-attr]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.tokens, options.vocabulary, options.width, options.chunk)
    if options.side:
        print(json.dumps(measure(options.side, *sizes, options.frozen)))
        return 0
    shape = f"T = {sizes[0]}, V = {sizes[1]}, d = {sizes[2]}, chunk {sizes[3]}"
    lines = [f"{shape}, float32, best of {options.repeats}"]
    good = True
    for frozen in (False, True):
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side in SIDES:
                command = [sys.executable, __file__, "--side", side, *(["--frozen"] if frozen else [])]
                for name in ("tokens", "vocabulary", "width", "chunk"):
                    command += [f"--{name}", str(getattr(options, name))]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                runs[side].append(json.loads(done.stdout))
        best = {side: min(run["seconds"] for run in runs[side]) for side in SIDES}
        work = {side: min(run["work"] for run in runs[side]) for side in SIDES}
        memory = {side: max(run["bytes"] for run in runs[side]) for side in SIDES}
        share, ratio = memory["chunked"] / memory["full"], work["chunked"] / work["full"]
        apart = max(abs(runs["full"][0][key] / runs["chunked"][0][key] - 1) for key in ("check", "slope"))
        good &= share < 0.15 and ratio <= 1.15 and apart < 1e-4
        lines.append(f"head {'frozen' if frozen else 'trained'}:")
        lines += [
            f"  {side:8s} {best[side]:7.2f} s  ({work[side]:.2f} s of processor)  "
            f"{memory[side] / 2**20:6.0f} MiB extra"
            for side in SIDES
        ]
        lines.append(
            f"  chunked / full: memory {share:.1%} (below 15 %), processor time {ratio:.2f} (at most 1.15), "
            f"by the clock {best['chunked'] / best['full']:.2f}"
        )
    lines.append("within the bounds" if good else "OUTSIDE THE BOUNDS")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
