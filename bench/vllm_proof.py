"""What vLLM says beside our policy and transformers, on SmolLM2-135M-Instruct: docs/proofs/vllm.txt.

    python bench/vllm_proof.py VLLM_PYTHON [float32|bfloat16] ['{"enforce_eager": true}']

Greedy ids, log-probabilities of sampled tokens at temperature 0.7, seeds, and a weight reload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepladder.engines.vllm.control import start
from stepladder.engines.vllm.engine import VllmEngine
from stepladder.policies.export import export_model
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model
from stepladder.types import Generation, Sampling
from stepladder.workbench.engine import policy_logprobs

TEXTS = (
    "What is 17 plus 25?",
    "Name three colours.",
    "Write a short poem about rain.",
    "The capital of France is",
    "Explain why the sky is blue.",
    "Count from one to ten.",
)
CONTEXT, TOKENS = 256, 32


def differences(policy: Policy, prompt: Sequence[int], got: Generation, temperature: float) -> list[float]:
    """|server's log-probability - policy's| of each sampled token."""
    wanted = policy_logprobs(policy, [*prompt, *got.token_ids], temperature)[len(prompt) - 1 :]
    return [abs(a - b) for a, b in zip(wanted, got.logprobs, strict=True)]


async def generate(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
) -> list[Generation]:
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(engine.session(str(i))) for i in range(len(prompts))]
        asked = zip(sessions, prompts, sampling, strict=True)
        return await asyncio.gather(*(s.generate(p, x) for s, p, x in asked))


def greedy(policy: Policy, prompt: Sequence[int], stop: int) -> tuple[list[int], list[float]]:
    """transformers' own greedy ids, and at each step how far its best token leads the second, in nats."""
    given: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": stop}
    given |= {"pad_token_id": stop, "output_scores": True, "return_dict_in_generate": True}
    out = policy.lm.generate(torch.tensor([list(prompt)]), **given)
    top = [score[0].float().log_softmax(-1).topk(2).values for score in out.scores]
    return out.sequences[0, len(prompt) :].tolist(), [float(t[0] - t[1]) for t in top]


def main() -> None:
    python = sys.argv[1]
    dtype = sys.argv[2] if len(sys.argv) > 2 else "float32"
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    policy = Policy(*load_model("smollm2-135m-instruct", dtype=dtype, device="cpu"))
    tokenizer, stop = policy.tokenizer, 2
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in TEXTS
    ]

    def export(folder: Path) -> None:
        export_model(policy.model, tokenizer, folder, merged=True, untied=True)

    began = time.monotonic()
    control = start(python, export, dtype=policy.dtype, max_context=CONTEXT, options=options)
    print(f"{dtype}: vLLM {control._call('GET', '/version')['version']}, torch {torch.__version__}")
    print(f"  started in {time.monotonic() - began:.0f} s")
    with asyncio.Runner() as runner:
        try:
            engine = VllmEngine(
                control,
                export=export,
                scores=lambda ids, temperature: policy_logprobs(policy, ids, temperature),
                vocabulary=policy.lm.get_input_embeddings().weight.shape[0],
                max_context=CONTEXT,
                dtype=policy.dtype,
            )
            measure(engine, policy, prompts, runner, stop)
            runner.run(engine.close())
        finally:
            control.kill()


def measure(
    engine: VllmEngine, policy: Policy, prompts: list[list[int]], runner: asyncio.Runner, stop: int
) -> None:
    print(f"  handshake: mean |difference| {engine.mismatch:.2g} nats a token")
    got = runner.run(generate(engine, prompts, [Sampling(0.0, TOKENS, (stop,), 0)] * len(prompts)))
    same, lines = 0, []
    for text, prompt, one in zip(TEXTS, prompts, got, strict=True):
        wanted, leads = greedy(policy, prompt, stop)
        if list(one.token_ids) == wanted:
            same += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(one.token_ids, wanted)) if a != b)
        lines.append(f"    {text!r}: from token {at}; there the best two are {leads[at]:.3g} nats apart")
    print(f"  greedy ids equal to transformers' generate: {same} of {len(prompts)} prompts")
    print("\n".join(lines), end="\n" if lines else "")
    many = [p for p in prompts for _ in range(4)]
    seeds = [Sampling(0.7, TOKENS, (stop,), i) for i in range(len(many))]
    first, second = (runner.run(generate(engine, many, seeds)) for _ in range(2))
    off = [d for p, g in zip(many, first, strict=True) for d in differences(policy, p, g, 0.7)]
    print(
        f"  sampled at temperature 0.7: {len(off)} tokens, mean |difference| {sum(off) / len(off):.2g}, "
        f"max {max(off):.2g}; the same seeds gave the same ids in "
        f"{sum(a.token_ids == b.token_ids for a, b in zip(first, second))} of {len(many)}"
    )
    stopped = [g for g in first if g.finish_reason == "stop"]
    kept = all(g.token_ids[-1] == stop for g in stopped)
    print(f"  {len(stopped)} ended at the stop token, kept in all: {kept}")
    reload(engine, policy, prompts, runner, stop)


def reload(
    engine: VllmEngine, policy: Policy, prompts: list[list[int]], runner: asyncio.Runner, stop: int
) -> None:
    before, fingerprint = engine.canary(), engine.weights_fingerprint()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            spread = parameter.float().std().to(parameter.dtype)
            parameter.add_(0.05 * spread * torch.randn_like(parameter))
    print(f"  canary: {before:.2g}; policy perturbed, not synced: {engine.canary():.2g} (fails)")
    assert engine.weights_fingerprint() == fingerprint
    began = time.monotonic()
    engine.sync(1)
    print(f"  sync in {time.monotonic() - began:.1f} s; canary {engine.canary():.2g} (passes)")
    assert engine.weights_fingerprint() != fingerprint
    got = runner.run(
        generate(engine, prompts, [Sampling(1.0, TOKENS, (stop,), i) for i in range(len(prompts))])
    )
    off = [d for p, g in zip(prompts, got, strict=True) for d in differences(policy, p, g, 1.0)]
    print(f"  sampled after it: mean |difference| {sum(off) / len(off):.2g}, max {max(off):.2g}")
    print(f"  versions of the tokens: {sorted({v for g in got for v, _ in g.versions})}")


if __name__ == "__main__":
    main()
