"""vLLM's side of bench/decode.py; runs in the environment of bench/make_vllm_env.sh.

The first line of stdin says which model; each further line is one batch of requests, answered by one line
with the seconds it took and the ids. The prefix cache is on, and emptied before each batch.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what the library prints must not come between the answers
    os.dup2(2, 1)
    import vllm

    def say(answer: dict) -> None:  # type: ignore[type-arg]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    given = json.loads(sys.stdin.readline())
    options = {"enforce_eager": True, "enable_prefix_caching": True, "max_model_len": 2048} | given
    llm = vllm.LLM(disable_log_stats=True, **options)
    say({"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        say(batch(vllm, llm, asked))


def batch(vllm, llm, asked: dict) -> dict:  # type: ignore[no-untyped-def, type-arg]
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    sampling = [
        vllm.SamplingParams(
            temperature=asked["temperature"], max_tokens=count, ignore_eos=True, detokenize=False
        )
        for count in asked["counts"]
    ]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    made = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "ids": [list(out.outputs[0].token_ids) for out in made]}


if __name__ == "__main__":
    main()
