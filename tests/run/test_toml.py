"""What the writer writes, the standard library reads back."""

import datetime
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.errors import ConfigError
from stepladder.run.toml import to_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALAR = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.dates()
    | st.datetimes()
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXT, VALUE, max_size=4))
def test_round_trip(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_a_recipe_reads_well() -> None:
    recipe = {
        "sft": {"steps": 3, "optimizer": {"lr": 1e-4}},
        "seed": 0,
        "model": {"name": "x", "lora": None, "path": Path("a/b")},
        "stage": [{"name": "a"}, {"name": "b"}],
    }
    assert to_toml(recipe) == (
        "seed = 0\n\n[sft]\nsteps = 3\n\n[sft.optimizer]\nlr = 0.0001\n\n[model]\n"
        'name = "x"\n# lora is not set\npath = "a/b"\n\n[[stage]]\nname = "a"\n\n[[stage]]\nname = "b"\n'
    )


def test_special_values() -> None:
    table = {"inf": math.inf, "minus": -math.inf, "time": datetime.time(1, 2), "q.x \x7f": '"\\\n\x01'}
    assert tomllib.loads(to_toml(table)) == table
    assert math.isnan(tomllib.loads(to_toml({"x": math.nan}))["x"])


@pytest.mark.parametrize("bad", [{"a": {"b": object()}}, {"a": [None]}, {1: 2}])
def test_what_toml_cannot_hold_is_refused(bad: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError):
        to_toml(bad)
