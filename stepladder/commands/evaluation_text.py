"""An evaluation as text for the terminal, from its summary: of one model or two, of one sample or many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_evaluation(summary: Mapping[str, Any], console: Console) -> None:
    """Print success by domain, curves where tasks were played more than once, remarks, and comparisons."""
    for played in summary["played"]:
        budget = f", {played['budget']} tokens per turn" if played["budget"] else ""
        title = f"{played['model']} on {summary['environment']}{budget}"
        console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(_domains(played))
        if summary["samples"] > 1:
            console.print(_curves(played["curves"]))
        console.print(_remarks(played, summary), highlight=False)
        if failure := played["first_failure"]:
            said = f"the first failure, at the {failure['boundary']}: {failure['message']}"
            console.print(said, highlight=False, markup=False)
    for comparison in summary["comparisons"]:
        for line in comparison_text(comparison):
            console.print(line, highlight=False)


def _domains(played: Mapping[str, Any]) -> Table:
    table = Table(box=None)
    table.add_column("")
    table.add_column("solved", justify="right")
    table.add_column("n", justify="right")
    domains = played["by_domain"]
    if len(domains) > 1:
        for name, domain in domains.items():
            table.add_row(name, f"{domain['success']:.0%}", str(domain["n"]))
    n = sum(domain["n"] for domain in domains.values())
    table.add_row("[bold]all[/]", f"[bold]{played['success']:.1%}[/]", str(n))
    return table


def _curves(curves: Mapping[str, list[dict[str, Any]]]) -> Table:
    table = Table(box=None)
    table.add_column("samples")
    for kind in curves:
        table.add_column(f"{kind}@k", justify="right")
    for row in zip(*curves.values(), strict=True):
        table.add_row(str(row[0]["k"]), *(_share(point) for point in row))
    return table


def _remarks(played: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    low, high = played["interval"]
    text = (
        f"95% interval {low:.1%} to {high:.1%}; {played['episodes']} episodes at temperature "
        f"{summary['temperature']:g}; used a tool in {played['tool_rate']:.0%} of them; "
        f"{played['truncated']} cut off, {played['failed']} failed (counted as unsolved), "
        f"{played['without_answer']} without an answer; {played['mean_tokens']:.0f} tokens per episode; "
        f"{played['seconds']:.0f} s"
    )
    if played["calibration"]:
        gap = played["calibration"]["gap"]
        sure = "surer than right" if gap > 0 else "less sure than right"
        text += f"; votes are off by {played['calibration']['ece']:.2f} (ECE), {abs(gap):.2f} {sure}"
    return text


def comparison_text(c: Mapping[str, Any]) -> list[str]:
    """Return what the paired comparison says, and which families were gained and lost."""
    all_ = c["overall"]
    low, high = all_["interval"]
    lines = [
        f"{c['one']} minus {c['other']}: {100 * all_['difference']:+.1f} points (95% {100 * low:+.1f} to "
        f"{100 * high:+.1f}); better on {all_['better']} tasks, worse on {all_['worse']}, equal on "
        f"{all_['equal']}; p = {all_['p']:.2g} (exact sign test)"
    ]
    for name, d in sorted(c["by_domain"].items(), key=lambda item: item[1]["difference"]):
        low, high = d["interval"]
        verdict = "lost" if high < 0 else "gained" if low > 0 else "not told apart"
        lines.append(
            f"  {name}: {d['other']:.0%} -> {d['one']:.0%} ({100 * low:+.0f} to {100 * high:+.0f}), {verdict}"
        )
    if c["passed"]:
        lines += _passed_text(c, c["passed"])
    return lines


def _passed_text(c: Mapping[str, Any], passed: Mapping[str, Any]) -> list[str]:
    """Return pass@k of all samples, and the crossover, or that there is none."""
    k, last = passed["k"], passed["last"]
    low, high = last["interval"]
    text = (
        f"pass@{k}: {c['one']} {last['one']:.1%}, {c['other']} {last['other']:.1%}, difference "
        f"{100 * last['difference']:+.1f} points (95% {100 * low:+.1f} to {100 * high:+.1f})"
    )
    if passed["ahead"] is None:
        return [text, "pass@k: neither is ahead at k = 1"]
    ahead, behind = (c["one"], c["other"]) if passed["ahead"] == "one" else (c["other"], c["one"])
    if passed["crossover"] is None:
        return [text, f"pass@k: {behind} is behind {ahead} at every k from 1 to {k}: no crossover"]
    return [
        text,
        f"pass@k: {behind}, behind at k = 1, has caught up with {ahead} at k = {passed['crossover']}",
    ]


def _share(point: Mapping[str, Any]) -> str:
    """Return a share with its interval."""
    return f"{100 * point['value']:.1f}% ({100 * point['low']:.1f} to {100 * point['high']:.1f})"
