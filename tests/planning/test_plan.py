"""A recipe as a plan: what each algorithm holds, how settings move it, what is advised, what is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spine import digit_recipe
from test_shape import SMOL
from typer.testing import CliRunner

from stepladder import ladder
from stepladder.cli import app
from stepladder.errors import ModelNotFound
from stepladder.planning.advice import advice, fits
from stepladder.planning.machine import Machine
from stepladder.planning.measured import FILE, Measured, measured_json, read_measured
from stepladder.planning.plan import Plan, RungPlan, plan_recipe
from stepladder.planning.shape import Shape, shape_of
from stepladder.planning.show import plan_text
from stepladder.planning.sources import model_shape
from stepladder.recipe.config import Recipe, bundled_recipes, load_recipe
from stepladder.run.progress import Display
from stepladder.rungs.registry import needs_of

ALL, EMBEDDINGS = 134_515_008, 28_311_552
MACHINE = Machine("cpu", 8e9, 16e9, "the machine", 1e11, 1e10)


def smol(name: str, options: Any = None) -> Shape:
    return shape_of(SMOL)


def planned(recipe: Recipe, dtype: str = "float32", machine: Machine | None = None) -> Plan:
    return plan_recipe(
        recipe, needs_of(recipe), device="cpu", dtype=dtype, machine=machine, shape_by_name=smol
    )


def rl(**section: Any) -> Recipe:
    world = {"name": "calculator", "rewards": section.pop("rewards", [])}
    model = section.pop("model", {})
    return load_recipe({"model": model, "environment": world, "rl": {"token_budget": 512, **section}})


def rung(recipe: Recipe, **options: Any) -> RungPlan:
    (only,) = planned(recipe, **options).rungs
    return only


def sizes(found: RungPlan) -> dict[str, float]:
    return {part.name: part.bytes for part in found.parts}


def test_from_ppo_with_four_models_down_to_lora() -> None:
    """Each step down takes a part away: the critic's trunk, then critic and reward model, then the reference,
    then the optimiser of all but an adapter."""
    ppo = {"algorithm": "ppo", "kl": {"coefficient": 0.05}, "rewards": ["reward_model:not-there"]}
    chain = [
        rl(**ppo),
        rl(**ppo, critic={"trunk": "shared"}),
        rl(algorithm="grpo", kl={"coefficient": 0.04}),
        rl(algorithm="grpo", kl={"coefficient": 0.0}),
        rl(algorithm="grpo", kl={"coefficient": 0.0}, model={"lora": {"rank": 16}}),
    ]
    peaks = [rung(recipe).peak for recipe in chain]
    assert peaks == sorted(peaks, reverse=True)
    four = sizes(rung(chain[0]))
    for name in ("policy", "reference", "critic", "reward_model not-there"):
        assert four[name] == 4 * ALL
    assert four["critic: Adam moments"] == 8 * (ALL + 576)
    assert "critic" not in sizes(rung(chain[1]))
    assert rung(chain[0]).notes == ("not-there is no folder here; it is counted as large as the policy",)
    # r · (inputs + outputs) of seven projections: 16·(2·1152 + 2·768 + 3·2112) · 30 layers
    assert rung(chain[4]).trainable == 16 * (2 * 1152 + 2 * 768 + 3 * 2112) * 30


def test_what_is_trained() -> None:
    files = {"sft": {"data": "x.jsonl", "validation": 0}}
    whole = rung(load_recipe(files))
    frozen = rung(load_recipe({**files, "model": {"train_embeddings": False}}))
    assert (whole.trainable, whole.frozen) == (ALL, 0)
    assert (frozen.trainable, frozen.frozen) == (ALL - EMBEDDINGS, EMBEDDINGS)


def test_a_preference_rung_holds_no_reference_model() -> None:
    """Its log-probabilities were logged before the first step."""
    found = sizes(rung(load_recipe({"preference": {"data": "x.jsonl"}})))
    assert "reference" not in found
    assert found["policy: best epoch so far"] == 4 * ALL  # it is validated


def test_a_reward_model_is_a_copy_with_a_head() -> None:
    found = rung(load_recipe({"reward_model": {"data": "x.jsonl"}}))
    assert sizes(found)["copy with a head"] == 4 * ALL
    assert found.trainable == ALL + 576
    assert "log-probabilities" not in sizes(found)


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_every_bundled_recipe_has_a_plan(name: str) -> None:
    recipe = load_recipe(name)
    plan = planned(recipe, machine=MACHINE)
    assert [r.name for r in plan.rungs]
    for found in plan.rungs:
        assert found.seconds is not None
        assert found.seconds > 0
        assert found.peak > 4 * found.trainable
    text = plan_text(name, plan, MACHINE, advice={}, measured={})
    assert max(map(len, text.splitlines())) <= 140


def test_tokens_and_steps() -> None:
    """42 demonstrations (21 more are held out), 6 a step: 7 steps an epoch, 16 epochs. A step of RL: 8
    groups, of each the prompt once (640 - 3·64 = 448) and 16 times what may follow it (192)."""
    sft, found = planned(load_recipe("calculator")).rungs
    assert (sft.tokens, sft.steps) == (6 * 640, 112)
    assert (found.tokens, found.steps) == (8 * (448 + 16 * 192), 45)


def test_the_mask_of_a_group() -> None:
    """A group of calculator: its prompt once, 448, and 16 times 192: 3,520 tokens beside 16,000 of a row.
    On a CPU there is no such square."""
    recipe = load_recipe("calculator", ["rl.token_budget=16000"])
    _, found = plan_recipe(recipe, needs_of(recipe), device="cuda", dtype="float32", shape_by_name=smol).rungs
    assert sizes(found)["masks of shared prefixes"] == 3520 * 16_000 * 30 * 4
    assert "masks of shared prefixes" not in sizes(planned(recipe).rungs[1])


def test_more_work_takes_longer() -> None:
    """More epochs of updates, a KL reference, a critic: each adds time; a faster machine takes it away."""
    times = [
        rung(recipe, machine=MACHINE).seconds or 0.0
        for recipe in (
            rl(algorithm="grpo", kl={"coefficient": 0.0}),
            rl(algorithm="grpo", kl={"coefficient": 0.04}),
            rl(algorithm="ppo", kl={"coefficient": 0.04}),
            rl(algorithm="ppo", kl={"coefficient": 0.04}, updates_per_batch=4),
        )
    ]
    assert times == sorted(times)
    assert len(set(times)) == 4
    fast = Machine("cpu", 8e9, 16e9, "the machine", 1e12, 1e11)
    assert rung(rl(), machine=fast).seconds == pytest.approx((rung(rl(), machine=MACHINE).seconds or 0) / 10)


# -- advice ------------------------------------------------------------------------------------------------


def advised(recipe: Recipe, free: float) -> str:
    name = next(r.name for r in planned(recipe).rungs)

    def of(changed: Recipe) -> Plan:
        dtype = "float32" if changed.model.dtype == "auto" else changed.model.dtype
        return planned(changed, dtype)

    return advice(recipe, name, free, of)


def test_the_mildest_setting_that_is_enough() -> None:
    """SFT of all weights in float32: 0.4 + 16 bytes · 134.5 M = 2.55 GB, and at 4,096 tokens 3.40 GB of
    activations, and slack; with less and less room first the budget, then the embeddings, then an adapter."""
    recipe = load_recipe({"model": {"dtype": "float32"}, "sft": {"data": "x.jsonl", "validation": 0}})
    assert advised(recipe, 8e9).startswith("set sft.token_budget = 2048: about ")
    assert advised(recipe, 3.9e9).startswith("set sft.token_budget = 256: about ")
    assert "model.train_embeddings = false and sft.token_budget = 256" in advised(recipe, 3.4e9)
    assert "model.lora.rank = 16 and sft.token_budget = 256" in advised(recipe, 2.6e9)
    assert advised(recipe, 1e9).startswith("no setting of token_budget")


def test_what_is_advised_fits() -> None:
    recipe = load_recipe({"model": {"dtype": "float32"}, "sft": {"data": "x.jsonl", "validation": 0}})
    text = advised(recipe, 5e9)
    key, value = text.removeprefix("set ").split(":")[0].split(" = ")
    changed = load_recipe(
        {"model": {"dtype": "float32"}, "sft": {"data": "x.jsonl", "validation": 0}}, [f"{key}={value}"]
    )
    assert not fits(rung(recipe).peak, 5e9)
    assert fits(rung(changed).peak, 5e9)


# -- the command and the run -------------------------------------------------------------------------------


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Callable[..., Path]:
    """A recipe file of the tiny model, and a run of it."""

    def run(*overrides: str) -> Path:
        return ladder.train(digit_recipe(tmp_path, "run", *overrides), display=Display(quiet=True))

    return run


def test_the_command_says_what_is_estimated_and_what_measured() -> None:
    got = CliRunner().invoke(app, ["plan", "hidden_digit", "rl.token_budget=64"])
    assert got.exit_code == 0, got.output
    assert "hidden_digit: tiny on " in got.output
    assert "sft: trains " in got.output
    assert "rl: trains " in got.output
    assert "64 tokens × " in got.output
    assert "Measured just now: " in got.output
    assert "Everything else is estimated" in " ".join(got.output.split())


def test_a_run_measures_each_rung_once_and_the_plan_shows_it(tiny_recipe: Callable[..., Path]) -> None:
    path = tiny_recipe("rl.steps=1")
    table = read_measured(path)
    assert {name: row.step for name, row in table.items()} == {"sft": 2, "rl": 1}
    for row in table.values():
        assert 1e8 < row.peak_bytes < 20e9
        assert row.seconds > 0
        assert row.estimated_bytes > 0.4e9
    got = CliRunner().invoke(app, ["plan", str(path)])
    assert got.exit_code == 0, got.output
    assert "Measured at step 2: " in got.output
    assert "Measured at step 1: " in got.output


def test_what_was_measured_survives_its_file(tmp_path: Path) -> None:
    table = {"rl": Measured(2, 1.5e9, 3.25, 2e9, 4.0)}
    (tmp_path / FILE).write_text(measured_json(table))
    assert read_measured(tmp_path) == table
    assert table["rl"].sentence() == (
        "Measured at step 2: 1.50 GB at the peak (estimated at most 2.00), 3.2 s a step (estimated at most "
        "4.0)."
    )
    assert read_measured(tmp_path / "elsewhere") == {}


def test_a_plan_loads_no_weights(tmp_path: Path) -> None:
    """A folder with nothing but a config.json has a plan."""
    import json

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOL))
    assert model_shape(str(tmp_path / "model")).parameters == ALL


def test_a_model_that_is_nowhere() -> None:
    with pytest.raises(ModelNotFound, match="there is no model 'nobody/nothing' here"):
        model_shape("nobody/nothing")
