"""Small charts side by side with logarithmic axes, in one self-contained SVG: how costs grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from curves import COLOURS

from stepladder.reports.tables import number

LEFT, TOP, WIDTH, HEIGHT = 58, 34, 300, 200
CELL_W, CELL_H = LEFT + WIDTH + 130, TOP + HEIGHT + 44

Line = Sequence[tuple[float, float]]


def panels(charts: Mapping[str, tuple[str, Mapping[str, Line]]], *, columns: int = 2) -> str:
    """`charts`: title -> (label of the x axis, name -> points). Lines start at 1, their first point;
    the dashed one is linear growth.
    """
    rows = -(-len(charts) // columns)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CELL_W * columns} {CELL_H * rows}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for k, (title, (x, lines)) in enumerate(charts.items()):
        out.append(f'<g transform="translate({k % columns * CELL_W} {k // columns * CELL_H})">')
        out += [*_panel(title, x, lines), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(title: str, x: str, lines: Mapping[str, Line]) -> list[str]:
    scaled = {name: [(px, py / line[0][1]) for px, py in line] for name, line in lines.items()}
    xs = sorted({px for line in scaled.values() for px, _ in line})
    ys = [py for line in scaled.values() for _, py in line] + [xs[-1] / xs[0]]
    low, high = min(1.0, *ys), max(2.0, *ys)

    def at(px: float, py: float) -> tuple[float, float]:
        across = math.log(px / xs[0]) / math.log(xs[-1] / xs[0])
        return LEFT + across * WIDTH, TOP + (1 - math.log(py / low) / math.log(high / low)) * HEIGHT

    out = [f'<text x="{LEFT}" y="18" font-weight="bold" fill="#222">{escape(title)}</text>']
    for tick in _powers(low, high):
        py = at(xs[0], tick)[1]
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{py:.1f}" y2="{py:.1f}" stroke="#e5e7eb"/>')
        label = f"{number(tick)}×"
        out.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end" fill="#555">{label}</text>')
    for tick in xs:
        place = f'x="{at(tick, low)[0]:.1f}" y="{TOP + HEIGHT + 18}"'
        out.append(f'<text {place} text-anchor="middle" fill="#555">{tick:g}</text>')
    middle = f'x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 36}"'
    out.append(f'<text {middle} text-anchor="middle" fill="#222">{escape(x)}</text>')
    ends = " ".join("{:.1f},{:.1f}".format(*at(px, px / xs[0])) for px in (xs[0], xs[-1]))
    out.append(f'<polyline points="{ends}" fill="none" stroke="#222" stroke-dasharray="4 4"/>')
    for k, (name, line) in enumerate(scaled.items()):
        colour, place = COLOURS[k % len(COLOURS)], TOP + 12 + 20 * k
        path = " ".join("{:.1f},{:.1f}".format(*at(px, py)) for px, py in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        out.append(f'<rect x="{LEFT + WIDTH + 14}" y="{place - 9}" width="12" height="10" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + WIDTH + 32}" y="{place}" fill="#222">{escape(name)}</text>')
    return out


def _powers(low: float, high: float) -> list[float]:
    """Powers of 4 that lie within."""
    first, last = math.ceil(math.log(low, 4) - 1e-9), math.floor(math.log(high, 4) + 1e-9)
    return [4.0**k for k in range(first, last + 1)]
