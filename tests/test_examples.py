"""The scripts under examples/ run, and print what they say."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# The lines that the documents print for their loop, seed 0 (spec: equal-reward groups get exactly 0).
DOCUMENTED = """\
step   0  group reward=0.254  P(search@start)=0.172  P(correct|saw)=0.167
step  80  group reward=0.824  P(search@start)=0.959  P(correct|saw)=0.789
step 160  group reward=1.117  P(search@start)=0.994  P(correct|saw)=0.956
step 240  group reward=1.129  P(search@start)=0.997  P(correct|saw)=0.980
step 320  group reward=1.140  P(search@start)=0.998  P(correct|saw)=0.988
step 399  group reward=1.140  P(search@start)=0.998  P(correct|saw)=0.991
"""


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tabular_loop_prints_the_documented_lines(capsys):
    load("tabular_loop").main(0)
    assert capsys.readouterr().out == DOCUMENTED


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_tabular_loop_lands_in_the_bands_of_other_seeds(seed, capsys):
    search, right = load("tabular_loop").main(seed)
    lines = capsys.readouterr().out.splitlines()
    rewards = {int(line.split()[1]): float(line.split("reward=")[1].split()[0]) for line in lines}
    # Bands over ten seeds, guarded and unguarded.
    assert 0.147 <= rewards[0] <= 0.299
    assert 0.780 <= rewards[80] <= 0.956
    assert 1.055 <= rewards[160] <= 1.140
    assert 1.108 <= rewards[399] <= 1.150
    assert search >= 0.998
    assert right >= 0.990


def test_every_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 150, path


def test_the_own_environment_trains(tmp_path):
    """The README's environment, on a tiny model from scratch: two updates through the whole ladder."""
    import stepladder

    example = load("own_environment")
    recipe = {
        "run": {"name": "shop", "out": str(tmp_path)},
        "model": {"name": "tiny", "options": {"max_positions": 1024}},
        "rollout": {"max_turns": 2, "max_tokens": 8, "max_context": 900},
        "rl": {"steps": 2, "tasks_per_step": 2, "group_size": 2},
        "evaluation": {"tasks": 4, "raw": 0},
    }
    folder = stepladder.train(recipe, environment=example.Shop)
    assert (folder / "final" / "model.safetensors").is_file()
    assert "after RL" in (folder / "summary.txt").read_text()
