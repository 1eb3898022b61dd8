"""The trained model as it is written: it opens again, computes the same, and stops where training did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spine import digit_recipe

from stepladder import ladder
from stepladder.policies.pretrained import load_model
from stepladder.run.progress import Display
from stepladder.workbench.bench import Workbench


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> list[Workbench]:
    """The workbenches that a run made."""
    made: list[Workbench] = []
    prepare = ladder.prepare_run

    def kept(recipe: Any) -> Workbench:
        made.append(prepare(recipe))
        return made[-1]

    monkeypatch.setattr(ladder, "prepare_run", kept)
    return made


SHORT = ("rl=null", "sft.epochs=1", "evaluation.raw=0", "evaluation.tasks=2")


def test_lora_on_a_model_from_scratch_can_be_loaded_again(tmp_path: Path, benches: list[Workbench]) -> None:
    lora = ("model.lora.rank=4", "model.lora.targets=['q_proj', 'down_proj']")
    path = ladder.train(digit_recipe(tmp_path, "run", *SHORT, *lora), display=Display(quiet=True))
    model, _ = load_model(path / "final", dtype="float32", device="cpu")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    trained = benches[0].policy.model
    with torch.no_grad():
        moved = trained(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, moved, rtol=1e-5, atol=1e-5)
        with trained.disable_adapter():
            assert not torch.allclose(trained(input_ids=ids).logits, moved, rtol=1e-3, atol=1e-3)


def test_the_final_model_stops_where_the_run_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer's stops, of which a template may have more than the tokenizer's one end."""
    honest, stops = ladder.prepare_run, []

    def with_one_more_stop(recipe: Any) -> Workbench:
        bench = honest(recipe)
        bench.renderer.stop_token_ids = (*bench.renderer.stop_token_ids, 9)
        stops.extend(bench.renderer.stop_token_ids)
        return bench

    monkeypatch.setattr(ladder, "prepare_run", with_one_more_stop)
    path = ladder.train(digit_recipe(tmp_path, "run", *SHORT), display=Display(quiet=True))
    written = json.loads((path / "final" / "generation_config.json").read_text())["eos_token_id"]
    assert written == stops
    assert len(stops) == 2
