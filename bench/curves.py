"""Several curves in one self-contained SVG: what the benchmarks of reinforcement learning draw with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from stepladder.reports.charts import nice_ticks
from stepladder.reports.tables import number

COLOURS = ("#2b6cb0", "#38a169", "#dd6b20", "#d53f8c", "#805ad5", "#718096", "#b7791f", "#0987a0", "#e53e3e")
LEFT, TOP, WIDTH, HEIGHT, LEGEND = 62, 34, 560, 260, 170

Series = Mapping[str, Sequence[tuple[float, float]]]


def curves(
    series: Series, *, title: str, x: str, y: str, levels: Sequence[float] = (), top: float | None = None
) -> str:
    """Lines of (x, y) points, a legend, dashed `levels`."""
    points = [p for line in series.values() for p in line]
    x1 = max((px for px, _ in points), default=1.0) or 1.0
    low = min([0.0, *(py for _, py in points)])
    high = max([*(py for _, py in points), *levels, top or 0.0, low + 1e-9])

    def at(px: float, py: float) -> tuple[float, float]:
        return LEFT + px / x1 * WIDTH, TOP + (1 - (py - low) / (high - low)) * HEIGHT

    height = TOP + HEIGHT + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + LEGEND} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-weight="bold" fill="#222">{escape(title)}</text>',
    ]
    for tick in nice_ticks(low, high):
        _, py = at(0, tick)
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{py:.1f}" y2="{py:.1f}" stroke="#e5e7eb"/>')
        out.append(
            f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end" fill="#555">{number(tick)}</text>'
        )
    for tick in nice_ticks(0, x1, 5):
        place = f'x="{at(tick, low)[0]:.1f}" y="{TOP + HEIGHT + 18}"'
        out.append(f'<text {place} text-anchor="middle" fill="#555">{number(tick)}</text>')
    middle = LEFT + WIDTH / 2
    out.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle" fill="#222">{escape(x)}</text>')
    out.append(
        f'<text x="14" y="{TOP + HEIGHT / 2}" text-anchor="middle" fill="#222" '
        f'transform="rotate(-90 14 {TOP + HEIGHT / 2})">{escape(y)}</text>'
    )
    for level in levels:
        _, py = at(0, level)
        out.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{py:.1f}" y2="{py:.1f}" stroke="#222" '
            'stroke-dasharray="4 4"/>'
        )
    for k, (name, line) in enumerate(series.items()):
        colour = COLOURS[k % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(px, py)) for px, py in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        place = TOP + 12 + 20 * k
        out.append(f'<rect x="{LEFT + WIDTH + 14}" y="{place - 9}" width="12" height="10" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + WIDTH + 32}" y="{place}" fill="#222">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def smooth(line: Sequence[tuple[float, float]], width: int = 5) -> list[tuple[float, float]]:
    """The mean of the last `width` values at each point."""
    return [
        (x, sum(v for _, v in line[max(0, i + 1 - width) : i + 1]) / min(width, i + 1))
        for i, (x, _) in enumerate(line)
    ]


def mean_curve(lines: Sequence[Sequence[tuple[float, float]]], points: int = 60) -> list[tuple[float, float]]:
    """The mean of several curves on a common grid; a curve that ended keeps its last value."""
    end = max(line[-1][0] for line in lines)
    grid = [end * (k + 1) / points for k in range(points)]
    return [(x, sum(_at(line, x) for line in lines) / len(lines)) for x in grid]


def _at(line: Sequence[tuple[float, float]], x: float) -> float:
    known = [v for px, v in line if px <= x]
    return known[-1] if known else line[0][1]


def write(name: str, text: str) -> Path:
    """Into bench/results."""
    path = Path(__file__).parent / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
