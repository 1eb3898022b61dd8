"""An evaluation with several samples as a page and as plots, from its evaluation.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from stepladder.reports.lines import Line, LineChart
from stepladder.reports.tables import number, percent

_KINDS = {
    "pass": "pass@k: one of k is right",
    "maj": "maj@k: the most frequent answer",
    "best": "best@k: the highest reward",
    "weighted": "weighted@k: votes weighted by reward",
}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:4px 12px;text-align:right;border-top:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


def evaluation_plots(summary: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """(name, SVG): "samples", shares over k, where there is more than one; "budgets", over tokens a turn."""
    plots = []
    if summary["samples"] > 1:
        plots.append(("samples", _over_samples(summary).svg()))
    if len({p["budget"] for p in summary["played"]}) > 1:
        plots.append(("budgets", _over_budgets(summary).svg()))
    return plots


def _over_samples(summary: Mapping[str, Any]) -> LineChart:
    """Of the largest budget, where there are several."""
    lines = []
    budgets = [p["budget"] for p in summary["played"]]
    played = [p for p in summary["played"] if p["budget"] == budgets[-1]]
    for model, p in enumerate(played):
        for colour, (kind, points) in enumerate(p["curves"].items()):
            label = f"{kind}@k" + (f", {_short(p['model'])}" if len(played) > 1 else "")
            lines.append(Line(label, [_place(point, point["k"]) for point in points], colour, model > 0))
    return LineChart("solved over samples", "samples a task (k)", lines, doubling=True, bounds=(0.0, 1.0))


def _over_budgets(summary: Mapping[str, Any]) -> LineChart:
    lines = []
    for index, model in enumerate(dict.fromkeys(p["model"] for p in summary["played"])):
        own = [p for p in summary["played"] if p["model"] == model]
        for colour, kind in enumerate(own[0]["curves"]):
            at = own[0]["curves"][kind][0 if kind == "pass" else -1]["k"]
            points = [
                _place(point, p["budget"]) for p in own for point in p["curves"][kind] if point["k"] == at
            ]
            lines.append(Line(f"{kind}@{at}, {_short(model)}", points, colour, index > 0))
    return LineChart("solved over budget", "sampled tokens a turn", lines, doubling=True, bounds=(0.0, 1.0))


def _place(point: Mapping[str, Any], x: float) -> tuple[float, float, float, float]:
    return float(x), point["value"], point["low"], point["high"]


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2][:18]


def evaluation_page(summary: Mapping[str, Any]) -> str:
    """One HTML file without a script. Shares of tasks; intervals are 95 %."""
    title = f"Evaluation on {summary['environment']}"
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_about(summary))}</p>"]
    parts += [str(svg) for _, svg in evaluation_plots(summary)]
    for p in summary["played"]:
        budget = f", {p['budget']} tokens a turn" if p["budget"] else ""
        parts.append(f"<h2>{escape(p['model'] + budget)}</h2>")
        rows = [
            [str(points[0]["k"]), *(_share(point) for point in points)]
            for points in zip(*p["curves"].values(), strict=True)
        ]
        parts.append(_table(["k", *(_KINDS[kind] for kind in p["curves"])], rows))
        failed = f"{p['failed']} of {p['episodes']} episodes failed; they count as unsolved."
        parts.append(f"<p>{escape(failed)}</p>")
        if p["calibration"]:
            bins = [
                [number(b["confidence"]), percent(b["accuracy"]), str(b["n"])]
                for b in p["calibration"]["bins"]
            ]
            parts.append(_table(["share of votes", "right", "tasks"], bins))
    for c in summary["comparisons"]:
        parts.append(f"<h2>{escape(_short(c['one']))} against {escape(_short(c['other']))}</h2>")
        rows = [["all", *_gap(c["overall"])]]
        rows += [[name, *_gap(d)] for name, d in c["by_domain"].items()]
        parts.append(_table(["tasks", _short(c["other"]), _short(c["one"]), "difference"], rows))
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _about(summary: Mapping[str, Any]) -> str:
    return (
        f"{summary['tasks']} tasks of the split {summary['split']!r}, {summary['samples']} samples each, "
        f"temperature {summary['temperature']:g}, seed {summary['seed']}."
    )


def _gap(c: Mapping[str, Any]) -> list[str]:
    low, high = c["interval"]
    gap = f"{100 * c['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return [percent(c["other"]), percent(c["one"]), gap]


def _share(point: Mapping[str, Any]) -> str:
    return f"{percent(point['value'])} ({100 * point['low']:.1f} to {100 * point['high']:.1f})"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
