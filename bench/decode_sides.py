"""The engines that bench/decode.py compares, each as one thing that turns prompts into so many tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from roofline import wait
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from stepladder.engines.local.engine import LocalEngine
from stepladder.types import Generation, Sampling

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Work:
    """`group` completions of each prompt, of exactly `new` tokens, or each of its own in `lengths`."""

    prompts: Sequence[Ids]
    new: int
    group: int = 1
    greedy: bool = False
    lengths: Sequence[int] = ()

    @property
    def expanded(self) -> list[Ids]:
        return [ids for ids in self.prompts for _ in range(self.group)]

    @property
    def counts(self) -> list[int]:
        return list(self.lengths) or [self.new] * len(self.expanded)

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class Side(Protocol):
    """Nothing is kept from one `run` to the next. Returns seconds and the ids in the order of `expanded`."""

    def run(self, work: Work) -> tuple[float, list[Ids]]: ...

    def close(self) -> None: ...


def load(folder: Path | str, dtype: str, device: str = "cpu") -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.generation_config = GenerationConfig()
    return model.eval().to(device)


class Ours:
    """`LocalEngine`, one session a sequence, as a rollout has them. It gives log-probabilities too."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.device = model, str(next(model.parameters()).device)
        self.engine = LocalEngine(model, **options)
        self.runner = asyncio.Runner()
        self.sharing = 1.0

    def run(self, work: Work, *, keep: bool = False) -> tuple[float, list[Ids]]:
        if not keep:
            self.engine.drop_prefixes()
        self.engine.stats()
        wait(self.device)
        began = time.perf_counter()
        made = self.runner.run(self._all(work))
        wait(self.device)
        seconds = time.perf_counter() - began
        stats = self.engine.stats()
        self.sharing = (stats.generated - len(work.prompts) * work.group) / max(1, stats.row_steps)
        return seconds, [list(g.token_ids) for g in made]

    async def _all(self, work: Work) -> list[Generation]:
        temperature = 0.0 if work.greedy else 1.0

        async def one(ids: Ids, count: int, seed: int) -> Generation:
            with self.engine.session(f"{seed:06d}") as session:
                return await session.generate(ids, Sampling(temperature, count, (), seed))

        asked = zip(work.expanded, work.counts, strict=True)
        return await asyncio.gather(*(one(ids, count, i) for i, (ids, count) in enumerate(asked)))

    def prefill_and_steps(self, prompts: Sequence[Ids], steps: int) -> tuple[float, float]:
        """Seconds of the prompts with one token each, and then of `steps` more, by sessions that stay open:
        prompts that are computed among the first steps of others would blur the two."""
        self.engine.drop_prefixes()
        return self.runner.run(self._two_turns(prompts, steps))

    async def _two_turns(self, prompts: Sequence[Ids], steps: int) -> tuple[float, float]:
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(self.engine.session(f"{i:06d}")) for i in range(len(prompts))]
            times, histories = [], [list(ids) for ids in prompts]
            for turn, count in enumerate((1, steps)):
                wait(self.device)
                began = time.perf_counter()
                asked = [
                    session.generate(ids, Sampling(1.0, count, (), 1000 * turn + i))
                    for i, (session, ids) in enumerate(zip(sessions, histories))
                ]
                made = await asyncio.gather(*asked)
                wait(self.device)
                times.append(time.perf_counter() - began)
                histories = [[*ids, *m.token_ids] for ids, m in zip(histories, made)]
        return times[0], times[1]

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


class Transformers:
    """`generate` on a left-padded batch."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = str(next(model.parameters()).device)

    def run(self, work: Work) -> tuple[float, list[Ids]]:
        width = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=self.device)
        config = _config(work, num_return_sequences=work.group)
        wait(self.device)
        began = time.perf_counter()
        out = self.model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
        wait(self.device)
        return time.perf_counter() - began, out.tolist()

    def close(self) -> None:
        """Nothing is open."""


class ContinuousBatching:
    """transformers' `generate_batch`: its scheduler over a paged cache. It changes its model's attention."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = str(next(model.parameters()).device)

    def run(self, work: Work) -> tuple[float, list[Ids]]:
        blocks = sum(-(-(len(ids) + work.new) // 256) + 1 for ids in work.expanded)
        # By itself it takes, and clears, most of the machine's memory in every call.
        cache = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048)
        began = time.perf_counter()
        found = self.model.generate_batch(
            inputs=work.expanded,
            generation_config=_config(work),
            continuous_batching_config=cache,
            warmup=False,
        )
        seconds = time.perf_counter() - began
        made = [out.generated_tokens for _, out in sorted(found.items(), key=lambda item: _number(item[0]))]
        if [len(ids) for ids in made] != work.counts:
            raise RuntimeError(f"generate_batch gave {sum(map(len, made))} of {work.tokens} tokens")
        return seconds, made

    def close(self) -> None:
        """Nothing is open."""


def _number(request: str) -> int:
    return int("".join(c for c in request if c.isdigit()) or 0)


def _config(work: Work, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=not work.greedy,
        temperature=None if work.greedy else 1.0,
        top_k=None if work.greedy else 0,
        max_new_tokens=work.new,
        eos_token_id=None if "num_return_sequences" in more else -1,
        pad_token_id=0,
        **more,
    )


class Vllm:
    """vLLM in its own environment: bench/vllm_worker.py, spoken to line by line."""

    def __init__(
        self, python: str, folder: Path | str, dtype: str, rows: int, options: dict[str, Any]
    ) -> None:
        ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("STEPLADDER_VLLM_LOG") else None,
            text=True,
            env=ours,
        )
        first = {"model": str(folder), "dtype": dtype, "max_num_seqs": rows, **options}
        self.version = self._ask(first)["version"]

    def run(self, work: Work) -> tuple[float, list[Ids]]:
        answer = self._ask(
            {"prompts": work.expanded, "counts": work.counts, "temperature": 0.0 if work.greedy else 1.0}
        )
        return answer["seconds"], answer["ids"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(30)
            raise RuntimeError(f"the vLLM worker ended with {code}; STEPLADDER_VLLM_LOG=1 shows what it said")
        return json.loads(line)  # type: ignore[no-any-return]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
            return
        self.process.kill()
        self.process.wait()
