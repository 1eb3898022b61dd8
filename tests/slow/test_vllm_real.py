"""Through a real vLLM server: STEPLADDER_VLLM_PYTHON names its interpreter (bench/make_vllm_env.sh)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from spine import digit_recipe, lines

from stepladder import ladder
from stepladder.errors import EngineError, InvariantError
from stepladder.ladder import train
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.policies.optimizer import trainable
from stepladder.policies.policy import Policy
from stepladder.policies.tensors import load_tensors
from stepladder.recipe.config import Recipe, load_recipe
from stepladder.reports.run import read_jsonl
from stepladder.run.progress import Display
from stepladder.run.records import trajectory_from_dict
from stepladder.types import Sampling, Turn
from stepladder.workbench.engine import policy_logprobs
from stepladder.workbench.prepare import build_policy, prepare

PYTHON = os.environ.get("STEPLADDER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not PYTHON, reason="STEPLADDER_VLLM_PYTHON names no environment with vllm (bench/make_vllm_env.sh)"
    ),
]
SECTION = (
    "engine.kind=vllm",
    f"engine.python={PYTHON}",
    "engine.options={enforce_eager=true, max_num_seqs=64}",
    "engine.start_seconds=900",
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


# -- while the policy is trained -----------------------------------------------------------------------------

# vLLM computes attention for some sizes of head only; the smallest model of the other tests has another.
DIGIT = (*SECTION, 'model.options={ symbols = ["?", "S", "0", "1", "2", "3", "4"] }')
# An untrained model that rambles to its limit, so that every sync cuts generations.
AHEAD = (
    *DIGIT,
    "rl.off_policy.max_staleness=2",
    "rl.steps=8",
    "rl.tasks_per_step=4",
    "rl.learning_rate=1e-2",
    "rollout.max_turns=1",
    "rollout.max_tokens=40",
    "rollout.max_context=64",
    "sft.epochs=1",
    "sft.demonstrations=32",
    "sft.learning_rate=1e-6",
    "environment.name=tests/helpers/fault_worlds.py:Talking",
    "evaluation.raw=0",
    "evaluation.tasks=2",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=50",
)


def test_syncs_cut_generations_under_way_and_every_token_is_of_its_version(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each log-probability against the weights of the version it carries, read back from the checkpoints."""
    monkeypatch.chdir(Path(__file__).parents[2])
    recipe = digit_recipe(tmp_path, "run", *AHEAD)
    run = train(recipe, display=Display(quiet=True))
    policies = by_version(run, recipe)
    turns = [
        turn
        for record in read_jsonl(run / "trajectories" / "rl.jsonl")
        for turn in trajectory_from_dict(record).turns
    ]
    own: list[float] = []  # |server's - policy's| of the token's own version, and of the other it might be of
    other: list[float] = []
    cut = [turn for turn in turns if len(turn.versions) > 1]
    for turn in turns:
        versions = [v for v, n in turn.versions for _ in range(n)]
        said = {v: by_policy(policies[v], turn) for v in set(versions)}
        for at, version in enumerate(versions):
            own.append(abs(said[version][at] - turn.logprobs[at]))
            other += [abs(said[v][at] - turn.logprobs[at]) for v in said if v != version]
    steps = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]
    with capsys.disabled():
        longest = max(len(turn.versions) for turn in turns)
        print(
            f"\n{len(turns)} generations, {len(cut)} cut by a sync (up to {longest} versions in one), "
            f"{len(own)} tokens\n|server - policy of the token's version| mean {statistics.fmean(own):.2g}, "
            f"max {max(own):.2g}\nagainst the other versions of the generation, mean "
            f"{statistics.fmean(other):.2g}"
        )
        for m in steps:
            named = ("version_lag", "version_lag_max", "log_ratio_abs", "mismatch_k1", "canary", "failed")
            print(f"step {m['step']}: " + ", ".join(f"{k} {m[k]:.2g}" for k in named if k in m))
    assert "InvalidStateError" not in caplog.text  # of a socket that was read just as it was let go
    assert len(cut) >= 4
    assert max(own) < 1e-3
    assert statistics.fmean(other) > 100 * statistics.fmean(own)
    assert all(m["failed"] == 0 and m["version_lag_max"] <= 2 for m in steps)
    assert max(m["version_lag_max"] for m in steps) > 0


def by_version(run: Path, recipe: Recipe) -> dict[int, Policy]:
    """The policy of each version of the weights that a checkpoint kept."""
    store, found = CheckpointStore(run / "checkpoints", keep=50), {}
    for step in store.steps():
        folder = store.root / f"step-{step:08d}"
        state = store.load_state(folder)
        policy = build_policy(recipe)
        saved = load_tensors(folder / ladder.TENSORS)
        with torch.no_grad():
            for name, parameter in trainable(policy.model).items():
                weights = saved.get(f"master/{name}")  # of an optimiser, or those alone
                parameter.copy_(saved[f"policy/{name}"] if weights is None else weights)
        found[int(state["engine_version"])] = policy
    return found


def by_policy(policy: Policy, turn: Turn) -> list[float]:
    ids = [*turn.prompt_ids, *turn.token_ids]
    return policy_logprobs(policy, ids, turn.sampling.temperature)[len(turn.prompt_ids) - 1 :]


@pytest.mark.parametrize("staleness", [0, 2], ids=["sync", "async"])
@pytest.mark.parametrize("victim", ["server", "engine core"])
def test_a_killed_server_ends_the_run_in_seconds_and_a_resumed_run_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, staleness: int, victim: str
) -> None:
    few = ("rl.steps=6", "evaluation.raw=0", "evaluation.tasks=2", "run.checkpoint_every=1")
    recipe = digit_recipe(tmp_path, "run", *DIGIT, *few, f"rl.off_policy.max_staleness={staleness}")
    run, killed_at = tmp_path / "run", [0.0]
    made: list[Any] = []

    def remembered(recipe: Any) -> Any:
        made.append(prepare(recipe))
        return made[-1]

    def kill() -> None:
        while not (run / "metrics.jsonl").is_file() or len(rl_steps(run)) < 2:
            time.sleep(0.02)
        guard = made[0].engine.control.server._process.pid
        (server,) = children(guard)
        victims = [server] if victim == "server" else children(server)
        killed_at[0] = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(ladder, "prepare_run", remembered)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        with pytest.raises(EngineError, match="vLLM server") as caught:
            train(recipe, display=Display(quiet=True))
    seconds = time.monotonic() - killed_at[0]
    before = len(rl_steps(run))
    ladder.resume(run, display=Display(quiet=True))
    steps = rl_steps(run)
    assert [m["step"] for m in steps] == list(range(1, 7))
    counts = Counter(t["group_id"] for t in lines(run / "trajectories" / "rl.jsonl"))
    assert len(counts) == 18
    assert set(counts.values()) == {4}
    assert all(m["tasks_drawn"] == 3 * m["step"] + m["tasks_waiting"] for m in steps)
    with capsys.disabled():
        first = str(caught.value).splitlines()[0]
        print(f"\n{victim} killed: ended {seconds:.1f} s later with {before} steps logged: {first[:200]}")
    assert seconds < 60


def rl_steps(run: Path) -> list[dict[str, Any]]:
    return [m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"]


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
