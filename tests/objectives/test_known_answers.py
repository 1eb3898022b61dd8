"""Preference losses trained until they stand still, where the mathematics says where that is.

The experiments are those of bench/preference.py, shorter.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "preference.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_preference", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_dpo_reaches_the_closed_form_and_the_naive_loss_falls_apart(bench: ModuleType) -> None:
    dpo = bench.dpo_run(beta=1.0, steps=400)
    naive = bench.dpo_run(beta=1.0, steps=400, naive=True)
    assert dpo.curve[0][1] > 0.04
    assert dpo.curve[-1][1] < 0.02
    assert naive.curve[-1][1] > 0.3
    assert float(naive.logprobs.detach().exp().max()) > 0.99  # one answer is left


def test_ipos_margin_ends_at_1_over_2_tau_and_dpos_does_not_end(bench: ModuleType) -> None:
    ipo = bench.margin_run("ipo", parameter=0.25, steps=400)
    assert ipo.curve[-1][1] == pytest.approx(2.0, abs=0.01)
    dpo = bench.margin_run("dpo", parameter=0.5, steps=400).curve
    quarters = [dpo[k * (len(dpo) - 1) // 4][1] for k in range(5)]
    assert all(b > a + 1 for a, b in pairwise(quarters))


def test_simpo_keeps_every_winner_gamma_above_every_loser(bench: ModuleType) -> None:
    simpo = bench.simpo_run(beta=2.0, gamma=1.0, steps=300).curve
    flat = bench.simpo_run(beta=2.0, gamma=0.0, steps=300).curve
    assert simpo[0][1] < 0
    assert simpo[-1][1] > 1.0
    assert simpo[-1][1] > flat[-1][1]


def test_kto_pushes_either_side_without_the_other(bench: ModuleType) -> None:
    good = bench.kto_run(beta=0.5, steps=200, desirable=(0, 7), undesirable=())
    bad = bench.kto_run(beta=0.5, steps=200, desirable=(), undesirable=(4, 11))
    assert good.curve[0][1] == bad.curve[0][1] == 0
    assert good.curve[-1][1] > 0.5
    assert bad.curve[-1][1] < -0.5


def test_the_picture_is_well_formed(bench: ModuleType) -> None:
    drawn, rows = bench.panels(20)
    assert len(drawn) == 4
    root = ElementTree.fromstring(bench.svg(drawn))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 8 + 3
    assert all(row.count("|") == 5 for row in rows)
