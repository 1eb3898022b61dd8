"""The speed benchmarks run, on a tiny model, and compute the right things from what they measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model
from stepladder.policies.tiny import tiny_model

BENCH = Path(__file__).parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import decode  # noqa: E402
import gpu  # noqa: E402
import growth  # noqa: E402
import grpo  # noqa: E402
import grpo_ours  # noqa: E402
import hot  # noqa: E402
import speed  # noqa: E402
import tools  # noqa: E402
import vs_trl  # noqa: E402
import vs_trl_ours  # noqa: E402
from grpo_common import Step  # noqa: E402
from measuring import Kept, Target, exponent, steepest  # noqa: E402
from panels import panels  # noqa: E402
from roofline import Cost, Roof  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model that speaks characters."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), hidden=32, layers=2, intermediate=48, max_positions=2048)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def options(module: Any, out: Path, *words: str) -> Any:
    return module.options_parser().parse_args(["--repeats", "1", "--out", str(out), *words])


def written(out: Path, part: str) -> dict[str, Any]:
    assert (out / f"{part}.md").read_text(encoding="utf-8").startswith("# ")
    return json.loads((out / f"{part}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


# -- what is computed from measurements ----------------------------------------------------------------


def test_a_number_is_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "part.json", []

    def measure() -> int:
        calls.append(1)
        return 7

    assert Kept(path, {"size": 1}).once("a", measure) == 7
    assert Kept(path, {"size": 1}).once("a", measure) == 7
    assert len(calls) == 1
    Kept(path, {"size": 2}, reuse="all").once("a", measure)
    assert len(calls) == 1
    Kept(path, {"size": 2}).once("a", measure)  # other settings
    Kept(path, {"size": 2}, reuse="none").once("a", measure)
    assert len(calls) == 3


def test_what_is_kept_names_no_path_of_the_machine(tmp_path: Path) -> None:
    Kept(tmp_path / "p.json", {"model": "/home/me/smol", "trl": "/home/me/bin/python"}).save()
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    assert "/home" not in text
    assert json.loads(text)["made"]["settings"] == {"model": "smol", "trl": True}


def test_verdicts() -> None:
    assert Target("x", 2.6, 2.0, 2.5).verdict == "aim reached"
    assert Target("x", 2.2, 2.0, 2.5).verdict == "reached"
    assert Target("x", 1.9, 2.0, 2.5).verdict == "NOT reached"
    assert Target("x", 0.4, 0.5, below=True).verdict == "reached"
    assert Target("x", 0.6, 0.5, below=True).verdict == "NOT reached"
    assert Target("x", None, 1.0, why="vllm was not given").verdict == "vllm was not given"


def test_exponents() -> None:
    assert exponent([(1, 5), (4, 5)]) == pytest.approx(0)
    assert exponent([(256, 3), (512, 6), (1024, 12)]) == pytest.approx(1)
    # slopes log2(4/2) = 1 and log2(32/4) = 3
    assert steepest([(1, 2), (2, 4), (4, 32)]) == pytest.approx(3)


def test_what_a_model_costs() -> None:
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    cost = Cost.of(LlamaForCausalLM(config), torch.bfloat16)
    # a layer: q and o 8·8 each, k and v 8·4 each, three MLP matrices 8·12, two norms of 8; then one norm
    assert cost.layers == 2 * (2 * 64 + 2 * 32 + 3 * 96 + 2 * 8) + 8
    assert cost.head == 80
    # scores and their sum over values: 2 multiply-adds for each of 4 heads · 2 wide · 2 layers
    assert cost.attention == 2 * 4 * 2 * 2
    assert cost.cache == 2 * 2 * 2 * 2 * 2  # keys and values, 2 heads, 2 wide, 2 layers, 2 bytes
    read, flops = cost.decode_step(3, 5)
    assert read == 2 * (cost.layers + 80) + 3 * 5 * 32
    assert flops == 3 * 2 * (cost.layers + 80 + 32 * 5)
    # causal: on average half of the 4 positions are seen
    assert cost.prefill(1, 4)[1] == 4 * 2 * (cost.layers + 32 * 2) + 2 * 80
    assert cost.train(10, 4) == 6 * (10 * cost.layers + 4 * 80)
    assert Roof(bandwidth=10, peak=100).seconds(50, 300) == 5
    assert Roof(bandwidth=10, peak=100).seconds(20, 300) == 3


def test_ragged_and_even_lengths_have_one_total() -> None:
    ragged = decode.ragged_lengths(64, 4, 256)
    assert min(ragged) == 4
    assert max(ragged) == 256
    even = decode.even_lengths(ragged)
    assert sum(even) == sum(ragged)
    assert max(even) - min(even) <= 1


def test_the_best_mode_of_transformers_counts() -> None:
    seconds = {"ours": [1.0, 3.0, 2.0], decode.MODES[0]: [4.0], decode.MODES[1]: [8.0], "vllm": [2.5]}
    lines, targets = decode.speed_lines({(64, 1): {"tokens": 64, "seconds": seconds, "sharing": 1.0}}, True)
    assert [t.value for t in targets] == pytest.approx([2.0, 1.25])  # 4/2 and 2.5/2
    assert "| - |" in lines[-1]  # the mode that was left out


def test_budgets_of_vs_trl() -> None:
    assert vs_trl.budget(["384", "reward=256"], "reward") == 256
    assert vs_trl.budget(["384", "reward=256"], "dpo") == 384
    side = {"tokens_per_second": 30.0, "peak_mb": 5.0, "state_mb": 4.0, "activation_mb": 1.0}
    theirs = {**side, "tokens_per_second": 10.0, "activation_mb": 4.0}
    _, targets = vs_trl.speed_table({"sft": {"ours": side, "theirs": theirs}})
    assert [t.value for t in targets] == [3.0, 0.25]


def test_the_faster_of_trls_modes_and_the_leaner_one() -> None:
    def found(seconds: float, activations: float) -> dict[str, Any]:
        many = {"seconds": [99.0, seconds], "peak_mb": [9.0, 9.0], "activation_mb": [99.0, activations]}
        return {**many, "kinds": ["short", "short"], "state_mb": 1.0}

    theirs = {"default": found(8.0, 4.0), "no-checkpointing": found(6.0, 10.0)}
    _, targets = grpo.table(found(2.0, 1.0), theirs, tokens=64)
    assert [t.value for t in targets[:2]] == [3.0, 0.25]
    assert targets[2].verdict == "trl was not given"  # no long step was made


def test_a_picture_of_growth() -> None:
    svg = panels(
        {"A": ("tokens", {"train": [(1, 2.0), (2, 4.0)]}), "B": ("rows", {"x": [(8, 1.0), (32, 1.0)]})}
    )
    assert svg.count("<polyline") == 4  # two curves, and linear growth twice
    assert svg.startswith("<svg")


# -- the parts run -------------------------------------------------------------------------------------------


def test_decode_runs_and_goes_on_where_it_stopped(folder: str, tmp_path: Path) -> None:
    words = ["--model", folder, "--sizes", "1", "8", "--new", "4", "--rows", "4", "--requests", "6"]
    words += ["--longest", "12", "--side", "64", "--dtype", "float32", "--without", decode.MODES[2]]
    targets = decode.run(options(decode, tmp_path, *words))
    found = written(tmp_path, "decode")
    assert found["values"]["greedy"]["ours float32"] == 1.0
    assert found["values"]["speed/8/8"]["tokens"] == 32
    assert all(t.value is not None for t in targets if not t.why)
    again = decode.run(options(decode, tmp_path, *words))
    assert again == targets
    assert written(tmp_path, "decode")["values"] == found["values"]


@pytest.mark.parametrize("exact", [True, False])
def test_our_grpo_step_updates(folder: str, exact: bool) -> None:
    policy = Policy(*load_model(folder, dtype="float32", device="cpu"))
    run = grpo_ours.Run(policy, group=4, new=6, exact=exact)
    before = policy.lm.model.layers[0].mlp.up_proj.weight.detach().clone()
    given = tuple(tuple(range(10 + i, 14 + i)) for i in range(8))
    try:
        metrics = run.step(Step("short", ("What is 1?", "Name a town."), given if exact else ()))
    finally:
        run.close()
    assert metrics["updated"] == 1.0
    assert metrics["grad_norm"] > 0
    assert not torch.equal(before, policy.lm.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("task", vs_trl.TASKS)
def test_our_side_of_vs_trl(folder: str, task: str) -> None:
    policy = Policy(*load_model(folder, dtype="float32", device="cpu"))
    rows = [{"prompt": [20 + i, 30, 31], "chosen": [40, 41 + i], "rejected": [50 + i]} for i in range(4)]
    run = vs_trl_ours.Ours(policy, rows, batch=2, budget=64)
    losses = getattr(run, task)()
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    if task == "sft":  # four rows of 5 tokens; the last 2 are trained, and after the last nothing is asked
        assert (run.computed, run.scored) == (16, 8)


def test_the_hottest_operators(folder: str, tmp_path: Path) -> None:
    hot.run(options(hot, tmp_path, "--model", folder, "--rows", "2", "--new", "3", "--length", "16"))
    tables = written(tmp_path, "hot")["values"].values()
    assert len(tables) == 2
    for rows in tables:
        assert 0 < sum(share for _, share, _ in rows) <= 1 + 1e-9
        assert any("mm" in name or "linear" in name for name, _, _ in rows)


def test_both_kinds_of_tools_sample_the_same_number_of_tokens(folder: str, tmp_path: Path) -> None:
    words = ["--episodes", "3", "--turns", "3", "--tokens", "4", "--seconds", "0.05"]
    (target,) = tools.run(options(tools, tmp_path, "--model", folder, *words))
    found = written(tmp_path, "tools")["values"]["tools"]
    assert found["tokens"] / found["slow"][0] >= 0.1  # two calls of 50 ms, one after the other
    assert target.value == pytest.approx(found["slow"][0] / found["instant"][0])


def test_growth_runs(folder: str, tmp_path: Path) -> None:
    words = ["--parts", "context", "group", "turns", "batch", "--contexts", "72", "96", "--groups", "2", "4"]
    words += ["--turns", "1", "3", "--batches", "2", "4", "--prompt", "12", "--new", "4", "--steps", "3"]
    growth.run(options(growth, tmp_path, "--model", folder, "--turn-tokens", "6", "--rows", "2", *words))
    found = written(tmp_path, "growth")["values"]
    assert found["turns/1"]["share of prompts reused"] == 0.0
    # turns of 6, 18 and 30 tokens: all but 6 + 7 + 7 (an observation and the last token) are known
    assert found["turns/3"]["share of prompts reused"] > 0.5
    assert (tmp_path / "growth.svg").read_text(encoding="utf-8").count("<g ") == 4


def test_the_gpu_benchmark_runs_anywhere(tmp_path: Path) -> None:
    words = [
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--sizes",
        "2",
        "--rows",
        "2",
        "--length",
        "16",
        "--side",
        "64",
    ]
    targets = gpu.run(options(gpu, tmp_path, *words, "--prompt", "8", "--new", "4", "--dtype", "float32"))
    assert targets[0].value is not None
    assert targets[0].value < 1e-3  # log-probabilities are transformers' own
    late = gpu.run(options(gpu, tmp_path / "late", *words, "--minutes", "0"))
    assert late == []
    assert "Left out" in (tmp_path / "late" / "gpu.md").read_text(encoding="utf-8")


def test_one_table_of_all_parts(tmp_path: Path) -> None:
    Kept(tmp_path / "tools.json", {}).save([Target("tools of 200 ms", 0.93, 0.9)])
    page = speed.page(tmp_path)
    assert "| tools of 200 ms | 0.93 | 0.9 |  | reached |" in page
    assert page.count("Not measured.") == 4
    words = ["--vllm", "P", "--more", "decode:--new", "decode:8", "grpo:--new"]
    line = speed.command("decode", options(speed, tmp_path, *words))
    assert line[-2:] == ["--new", "8"]
    assert line[line.index("--vllm") + 1] == "P"
    assert "--trl" not in line


@pytest.mark.slow
def test_memory_is_watched_from_outside(tmp_path: Path) -> None:
    seen = growth.memory(options(growth, tmp_path, "--run-steps", "20"))
    assert [step for step, _ in seen][-1] == 20
    assert all(mb > 50 for _, mb in seen)
