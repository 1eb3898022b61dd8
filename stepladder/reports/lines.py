"""Several curves with intervals in one SVG, such as pass@k and maj@k over k of two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from stepladder.reports.charts import nice_ticks
from stepladder.reports.tables import number

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 170, 14, 40
# Told apart by colour-blind eyes too (Okabe and Ito); the second model's lines are dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve of (x, value, low, high); `colour` is an index, lines of one index differ by `dashed`."""

    label: str
    points: Sequence[tuple[float, float, float, float]]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """Curves over one axis. `doubling`: x is shown in powers of 2, as sample counts are."""

    title: str
    x_label: str
    lines: Sequence[Line]
    doubling: bool = False
    bounds: tuple[float, float] | None = None

    def svg(self) -> Markup:
        """A whole SVG file: its colours stand in it, so that it opens anywhere."""
        values = [y for line in self.lines for point in line.points for y in point[1:]]
        low, high = self.bounds or (min(values), max(values))
        if high <= low:
            low, high = low - 0.5, high + 0.5
        xs = sorted({self._at(point[0]) for line in self.lines for point in line.points})
        frame = _Frame(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, low, high)
        body = [_grid(frame), *self._x_ticks(frame)]
        for line in self.lines:
            body.append(self._curve(frame, line))
        body += _legend(self.lines)
        middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
        body.append(_text(middle, HEIGHT - 6, self.x_label, "middle"))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="system-ui, sans-serif" font-size="11">'
        )
        return Markup(head + "".join(body) + "</svg>")  # noqa: S704 - every text in it is escaped

    def _at(self, x: float) -> float:
        return math.log2(x) if self.doubling else x

    def _x_ticks(self, frame: _Frame) -> list[str]:
        if not self.doubling:
            ticks = nice_ticks(frame.x0, frame.x1, 6)
            return [_text(frame.x(t), HEIGHT - BOTTOM + 16, number(t), "middle") for t in ticks]
        seen = sorted({point[0] for line in self.lines for point in line.points})
        return [_text(frame.x(self._at(x)), HEIGHT - BOTTOM + 16, number(x), "middle") for x in seen]

    def _curve(self, frame: _Frame, line: Line) -> str:
        colour = COLOURS[line.colour % len(COLOURS)]
        places = [(frame.x(self._at(x)), y, low, high) for x, y, low, high in line.points]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        upper = [f"{x:.1f},{frame.y(high):.1f}" for x, _, _, high in places]
        lower = [f"{x:.1f},{frame.y(low):.1f}" for x, _, low, _ in reversed(places)]
        out = [f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity=".1"/>']
        joined = " ".join(f"{x:.1f},{frame.y(y):.1f}" for x, y, _, _ in places)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for (x, y, low, high), point in zip(places, line.points, strict=True):
            told = f"{line.label}, {number(point[0])}: {number(y)} ({number(low)} to {number(high)})"
            out.append(
                f'<circle cx="{x:.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(told)}</title></circle>"
            )
        return "".join(out)


@dataclass(frozen=True, slots=True)
class _Frame:
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def _grid(frame: _Frame) -> str:
    out = []
    for tick in nice_ticks(frame.y0, frame.y1):
        y = frame.y(tick)
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" '
            'stroke-opacity=".25"/>'
        )
        out.append(_text(LEFT - 6, y + 4, number(tick), "end"))
    return "".join(out)


def _legend(lines: Sequence[Line]) -> list[str]:
    out, x = [], WIDTH - RIGHT + 14
    for row, line in enumerate(lines):
        y = TOP + 8 + 17 * row
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        colour = COLOURS[line.colour % len(COLOURS)]
        out.append(
            f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        out.append(_text(x + 30, y + 4, line.label, "start"))
    return out


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#666">{escape(text)}</text>'
