"""Every golden number of this layer is computed from its inputs by a public function."""

import json
from pathlib import Path

import golden_advantages
import golden_estimators
import golden_objectives
import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())
OWNERS = {"objectives", "advantages", "estimators", "diagnostics"}
OURS = {name: entry for name, entry in GOLDEN.items() if entry["owner"] in OWNERS}
CASES = golden_objectives.CASES | golden_advantages.CASES | golden_estimators.CASES
TOLERANCE = 1e-6


def differences(path: str, got: object, want: object, tolerance: float) -> list[str]:
    """Where two nested values of numbers, texts, lists and dictionaries disagree."""
    if isinstance(want, dict):
        if not isinstance(got, dict) or set(got) != set(want):
            return [f"{path}: keys {sorted(got) if isinstance(got, dict) else got!r} for {sorted(want)}"]
        return [d for key in want for d in differences(f"{path}.{key}", got[key], want[key], tolerance)]
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return [f"{path}: {got!r} for {want!r}"]
        pairs = enumerate(zip(got, want, strict=True))
        return [d for i, (g, w) in pairs for d in differences(f"{path}[{i}]", g, w, tolerance)]
    if isinstance(want, int | float) and isinstance(got, int | float):
        return [] if abs(got - want) <= tolerance else [f"{path}: {got!r} for {want!r}"]
    return [] if got == want else [f"{path}: {got!r} for {want!r}"]


def test_every_entry_of_this_layer_has_a_case_and_no_case_is_idle() -> None:
    assert set(CASES) == set(OURS)
    assert len(OURS) >= 118


@pytest.mark.parametrize("name", sorted(OURS))
def test_golden(name: str) -> None:
    entry = OURS[name]
    found = differences(name, CASES[name](), entry["value"], entry.get("tolerance", TOLERANCE))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (1.0, 1.00001),
        ([1.0], [1.0, 2.0]),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": [0.0]}, {"a": [1e-5]}),
        ("x", "y"),
    ],
)
def test_the_comparison_itself_notices(got: object, want: object) -> None:
    assert differences("x", got, want, TOLERANCE)
