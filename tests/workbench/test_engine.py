"""The engine of a recipe: what [engine] refuses before a model is loaded, and a run on a fake vLLM server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from spine import digit_recipe, tiny_policy

from stepladder.engines.engine import PolicyEngine
from stepladder.errors import ConfigError
from stepladder.recipe.config import eval_recipe, load_recipe
from stepladder.workbench import prepare as setup
from stepladder.workbench.engine import policy_logprobs

BASE: dict[str, Any] = {"environment": {"name": "hidden_digit"}, "rl": {}}
VLLM = ("engine.kind=vllm", "run.exact=false")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.python=/x/python"], ["'/x/python' says nothing about the local engine", 'kind = "vllm"']),
        (["engine.options={max_num_seqs=4}"], ["engine.options", "says nothing about the local engine"]),
        (["engine.deadline=5"], ["engine.deadline = 5.0 says nothing about the local engine"]),
        ([*VLLM], ["needs either engine.python or engine.url", "python=None and url=None"]),
        ([*VLLM, "engine.python=p", "engine.url=http://h"], ["either", "python='p' and url='http://h'"]),
        ([*VLLM, "engine.url=localhost:8000"], ["not an address", "http://localhost:8000"]),
        ([*VLLM, "engine.url=http://h", "engine.options={seed=1}"], ["for a server that the run starts"]),
        (["engine.kind=vllm", "engine.python=p"], ["bit for bit", "set run.exact = false"]),
        (["engine.kind=vlm"], ["engine.kind", "'local' or 'vllm'"]),
    ],
)
def test_contradictions_are_refused_with_what_works(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(BASE, overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_evaluation_refuses_the_same() -> None:
    with pytest.raises(ConfigError, match=r"set run\.exact = false"):
        eval_recipe({"environment": {"name": "hidden_digit"}}, ["engine.kind=vllm", "engine.python=p"])


def test_a_recipe_written_out_in_full_is_read_again() -> None:
    """The run folder holds every default; those of vLLM must not look like settings of the local engine."""
    for overrides in ([], [*VLLM, f"engine.python={sys.executable}"]):
        recipe = load_recipe(BASE, overrides)
        assert load_recipe(recipe.model_dump(mode="json", exclude_none=True)) == recipe


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.python=/no/python", "'/no/python' is no program.*make_vllm_env"),
        ("engine.folder=/no/folder", "'/no/folder' is no folder"),
    ],
)
def test_what_is_missing_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    there = [*VLLM] if "python" in override else [*VLLM, f"engine.python={sys.executable}"]
    with pytest.raises(ConfigError, match=words):
        setup.prepare(digit_recipe(tmp_path, "run", *there, override))


def test_the_local_engine_is_in_process(tmp_path: Path) -> None:
    bench = setup.prepare(digit_recipe(tmp_path, "run"))
    try:
        assert isinstance(bench.engine, PolicyEngine)
        assert bench.engine.in_process
    finally:
        bench.close()


def test_the_policys_log_probabilities_are_those_that_the_local_engine_gives(tmp_path: Path) -> None:
    bench = setup.prepare(digit_recipe(tmp_path, "run"))
    try:
        ids = [1, 4, 9, 8, 12, 6]
        assert policy_logprobs(bench.policy, ids, 1.0) == pytest.approx(
            bench.engine.token_logprobs(ids), abs=1e-5
        )
    finally:
        bench.close()
    cold, warm = (policy_logprobs(tiny_policy(), [3, 4, 5], t) for t in (0.5, 1.0))
    assert len(cold) == len(warm) == 2
    assert cold != warm
