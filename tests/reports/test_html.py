"""The page: well-formed, self-contained, and deaf to hostile text."""

import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.errors import DataError
from stepladder.reports.charts import Chart, Points, nice_ticks
from stepladder.reports.html import blocks, html_page, html_report
from stepladder.reports.run import RunData
from stepladder.reports.write import write_reports

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_run import evaluation, write_run

VOID = {"meta"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return html_report(write_run(tmp_path_factory.mktemp("html") / "run"))


def test_it_nests_and_needs_nothing_from_outside(page: str) -> None:
    parsed = Page(page)
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    for _, attributes in parsed.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page


def test_it_shows_the_rungs_the_families_and_the_curves(page: str) -> None:
    text = Page(page).text
    for words in (
        "after the warm start (SFT)",
        "83.5 %",
        "77.7 to 88.8 %",
        "two_operations",
        "sft: 40 steps",
    ):
        assert words in text
    for title in ("Reward", "Success", "Tool use", "Entropy", "Gradient norm", "Response length"):
        assert title in text
    assert "Engine mismatch" in text
    assert "Tokens per second" in text
    assert "clip fraction" in text  # a metric nobody told the page about


def test_sampled_tokens_are_marked_one_by_one(page: str) -> None:
    tokens = [
        attributes
        for tag, attributes in Page(page).tags
        if "token" in (attributes.get("class") or "").split()
    ]
    assert len(tokens) > 50
    assert all(re.fullmatch(r"p = [01]\.\d{3}", attributes["title"] or "") for attributes in tokens)


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></style><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x="',
    "'; --><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
]


def _poison(value: Any, text: str) -> Any:
    """Every string and key of a record replaced, the ones that steer the page aside."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [_poison(item, text) for item in value]
    if isinstance(value, dict):
        kept = ("role", "rung")
        out = {key: item if key in kept else _poison(item, text) for key, item in value.items()}
        return out | {f"{text} key": 0.5} if "correct" in out else out
    return value


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    rng = random.Random(0)
    evaluations = [_poison(evaluation(rung, 3, 0.5, 0.5, 60, rng), text) for rung in ("raw", "rl")]
    evaluations[0]["rung"] = text
    evaluations[1]["by_domain"] = {text: {"n": 3, "success": 0.5}}
    for role in (text, "assistant"):
        evaluations[1]["examples"][0]["messages"].append({"role": role, "content": text})
    metrics = [
        {"step": i, "phase": phase, text: 1.0, "success": 0.5} for i in range(3) for phase in (text, "rl")
    ]
    run = RunData(
        Path("/tmp") / "run", tuple(metrics), tuple(evaluations), text, {"cpu": text, "device": text}
    )
    parsed = Page(html_page(run))
    assert not {tag for tag, _ in parsed.tags} & {"script", "img"}
    for _, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")]
    assert text in parsed.text


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert "No evaluation was made in this run." in Page(html_report(tmp_path)).text
    with pytest.raises(DataError):
        html_report(tmp_path / "missing")


def test_both_reports_are_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    summary = write_reports(path)
    assert (path / "summary.txt").read_text() == summary
    Page((path / "report.html").read_text())
    assert not [p.name for p in path.iterdir() if p.name.endswith(".new")]


def test_a_lone_surrogate_in_a_run_does_not_stop_the_reports(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    record = json.loads((path / "evaluations.jsonl").read_text().splitlines()[0])
    record["examples"][0]["messages"][2]["raw"] = "half \ud800"
    (path / "evaluations.jsonl").write_text(json.dumps(record) + "\n")
    write_reports(path)
    assert (path / "report.html").exists()


def test_blocks_say_who_wrote_what() -> None:
    trajectory = {
        "messages": [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
            {"role": "tool", "content": [{"text": "4"}, {"image": "x.png"}]},
            {"role": "user", "content": "3+3"},
            {"role": "assistant", "content": "six", "raw": "six<end>"},
        ],
        "turns": [{"token_texts": ["six", "<end>"], "logprobs": [0.0, None]}],
    }
    out = blocks(trajectory)
    assert [(b.author, b.text) for b in out] == [
        ("user", "2+2"),
        ("example", 'f({"x": 1})'),
        ("tool", "4[image]"),
        ("user", "3+3"),
        ("policy", "six<end>"),
    ]
    assert [(t.text, t.probability) for t in out[-1].tokens] == [("six", 1.0), ("<end>", None)]
    assert blocks({**trajectory, "turns": []})[-1].tokens == []  # no token texts: the raw text is shown


VALUE = st.none() | st.floats(-1e12, 1e12, allow_subnormal=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUE, max_size=40), st.booleans())
def test_every_curve_stays_inside_its_picture(values: list[float | None], bounded: bool) -> None:
    chart = Chart(
        "t",
        "",
        list(enumerate(values)),
        Points("held-out", [(1.0, 0.5, 0.2, 0.8)]),
        [("sft", 0.3)],
        (0.0, 1.0) if bounded else None,
    )
    svg = str(chart.svg())
    Page(svg)
    pairs = re.findall(r"(-?[\d.]+(?:e[-+]\d+)?),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', svg)))
    for x, y in pairs:
        assert 40 <= float(x) <= 380
        assert 0 <= float(y) <= 170
    assert len(pairs) >= sum(value is not None for value in values)


def test_a_gap_breaks_the_line_and_rare_values_are_joined() -> None:
    gap = str(Chart("t", "", [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 2.0)]).svg())
    assert gap.count("<polyline") == 2
    rare = str(Chart("t", "", [(i, 1.0 * i if i % 5 == 0 else None) for i in range(11)]).svg())
    assert rare.count("<polyline") == 1
    assert rare.count('class="seen"') == 3


def test_labels_of_close_levels_are_joined() -> None:
    svg = str(
        Chart("t", "", [(0, 0.0), (1, 1.0)], levels=[("raw", 0.01), ("few-shot", 0.03), ("sft", 0.5)]).svg()
    )
    labels = re.findall(r'class="level-label"[^>]*>([^<]*)<', svg)
    assert labels == ["raw, few-shot", "sft"]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * max(1, abs(low)):
        return
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    slack = 1e-6 * width
    assert all(low - slack <= tick <= high + slack for tick in ticks)
