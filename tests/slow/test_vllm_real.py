"""Through a real vLLM server: STEPLADDER_VLLM_PYTHON names its interpreter (bench/make_vllm_env.sh)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from spine import lines

from stepladder.config import load_recipe
from stepladder.errors import EngineError, InvariantError
from stepladder.training.engines import policy_logprobs
from stepladder.training.ladder import train
from stepladder.training.progress import Display
from stepladder.training.setup import prepare
from stepladder.types import Sampling

PYTHON = os.environ.get("STEPLADDER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="STEPLADDER_VLLM_PYTHON names no environment with vllm (bench/make_vllm_env.sh)"
    ),
]
SECTION = (
    "engine.kind=vllm",
    f"engine.python={PYTHON}",
    "engine.options={enforce_eager=true, max_num_seqs=64}",
    "run.exact=false",
)


def test_the_tiny_recipe_trains_through_the_server(tmp_path: Path) -> None:
    short = ["rl.steps=3", "rl.tasks_per_step=8", "sft.epochs=1", "evaluation.raw=0", "evaluation.tasks=10"]
    recipe = load_recipe("hidden_digit", [f"run.out={tmp_path}", "run.name=run", *short, *SECTION])
    path = train(recipe, display=Display(quiet=True))
    steps = [m for m in lines(path / "metrics.jsonl") if m["phase"] == "rl"]
    assert len(steps) == 3
    for m in steps:
        assert m["failed"] == 0
        assert 0 < m["log_ratio_abs"] < 1e-4  # a server's own kernels, fp32
        assert abs(m["mismatch_k1"]) < 1e-4
    turns = [turn for t in lines(path / "trajectories" / "rl.jsonl") for turn in t["turns"]]
    assert {turn["versions"][0][0] for turn in turns} == {1, 2, 3}  # 1: after SFT


def test_ids_log_probabilities_and_weights_of_the_real_server(tmp_path: Path) -> None:
    """The tiny model's output embeddings are shared: a CPU build loads them only when exported apart."""
    bench = prepare(load_recipe("hidden_digit", SECTION))
    try:
        engine, policy, run = bench.engine, bench.policy, bench.runner.run
        vocabulary = policy.lm.get_input_embeddings().weight.shape[0]

        async def one(sampling: Sampling) -> tuple[tuple[int, ...], tuple[float, ...]]:
            with engine.session("a") as session:
                got = await session.generate([1, 4, 8], sampling)
                return got.token_ids, got.logprobs

        ids, logprobs = run(one(Sampling(0.5, 20, (), 3)))
        wanted = policy_logprobs(policy, [1, 4, 8, *ids], 0.5)[2:]
        assert logprobs == pytest.approx(wanted, abs=1e-4)
        assert run(one(Sampling(0.5, 20, (), 3)))[0] == ids
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        bench.sync()
        ids, logprobs = run(one(Sampling(1.0, 20, (), 3)))
        assert logprobs == pytest.approx(policy_logprobs(policy, [1, 4, 8, *ids], 1.0)[2:], abs=1e-4)
        with torch.no_grad():
            policy.lm.get_input_embeddings().weight.add_(1.0)
        engine._export = lambda folder: _old(folder, bench.engine)  # a sync that brings nothing new
        with pytest.raises((InvariantError, EngineError), match="did not arrive"):
            bench.sync()
        assert max(ids) < vocabulary
    finally:
        bench.close()


def _old(folder: Path, engine: object) -> None:
    """The weights that the server has already."""
    (newest,) = engine._folders  # type: ignore[attr-defined]
    shutil.copytree(newest, folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
