"""Curves as inline SVG: no script, no font, no file beside the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from stepladder.reports.tables import number

WIDTH, HEIGHT = 380, 170
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 22
MAX_POINTS = 400  # more would only make the file big; the last point always stays


@dataclass(frozen=True, slots=True)
class Points:
    """Held-out evaluations on top of a curve: (step, value, low, high)."""

    label: str
    values: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """One curve: (step, value) pairs, gaps where a value is None."""

    title: str
    hint: str
    curve: Sequence[tuple[float, float | None]]
    points: Points | None = None
    levels: Sequence[tuple[str, float]] = field(default_factory=tuple)  # dashed lines to compare with
    bounds: tuple[float, float] | None = None  # fixed axis, such as (0, 1) for shares

    @property
    def last(self) -> str:
        """The last value, as text."""
        known = [value for _, value in self.curve if value is not None]
        return number(known[-1]) if known else "-"

    def svg(self) -> Markup:
        """The drawing. Colours come from the page's CSS, so it follows light and dark."""
        scale = _Scale.of(self)
        body = [_axes(scale)]
        body += _levels(scale, self.levels)
        known = [pair for pair in self.curve if pair[1] is not None]
        sparse = len(known) < len(self.curve) / 2  # measured now and then: joined, with visible dots
        thin = _thin(known if sparse else self.curve)
        smooth = _smooth(thin) if len(thin) >= 16 and not sparse else None
        body += _lines(scale, thin, "raw" if smooth else "curve")
        if smooth:
            body += _lines(scale, smooth, "curve")
        body += _dots(scale, thin, "seen" if sparse or len(known) == 1 else "hit")
        if self.points:
            body += [_whisker(scale, self.points.label, *point) for point in self.points.values]
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
        return Markup(head + "".join(body) + "</svg>")  # noqa: S704 - every text in it is escaped above


@dataclass(frozen=True, slots=True)
class _Scale:
    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def of(cls, chart: Chart) -> _Scale:
        xs = [x for x, _ in chart.curve]
        ys = [y for _, y in chart.curve if y is not None]
        if chart.points:
            xs += [point[0] for point in chart.points.values]
            ys += [y for point in chart.points.values for y in point[1:]]
        ys += [value for _, value in chart.levels]
        low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        if chart.bounds:
            low, high = min(low, chart.bounds[0]), max(high, chart.bounds[1])
        elif high == low:
            low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
        x0, x1 = (min(xs), max(xs)) if xs else (0.0, 1.0)
        return cls(x0, x1 if x1 > x0 else x0 + 1, low, high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `count` of them.

    >>> nice_ticks(0, 1)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(scale: _Scale) -> str:
    out = []
    for tick in nice_ticks(scale.y0, scale.y1):
        y = scale.y(tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    for tick in nice_ticks(scale.x0, scale.x1, 5):
        x = scale.x(tick)
        label = number(tick)
        out.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>')
    return "".join(out)


def _levels(scale: _Scale, levels: Sequence[tuple[str, float]]) -> list[str]:
    """Dashed lines; those too close to tell apart share one label, above the highest of them."""
    right, out = WIDTH - RIGHT, []
    labels: list[tuple[float, str]] = []
    for label, value in sorted(levels, key=lambda level: level[1]):
        y = scale.y(value)
        out.append(f'<line class="level" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if labels and labels[-1][0] - y < 11:
            labels[-1] = (y, f"{labels[-1][1]}, {label}")
        else:
            labels.append((y, label))
    for y, label in labels:
        out.append(
            f'<text class="level-label" x="{right}" y="{y - 3:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return out


def _lines(scale: _Scale, curve: Sequence[tuple[float, float | None]], style: str) -> list[str]:
    """A polyline for each stretch without a gap."""
    out, stretch = [], []
    for step, value in [*curve, (0.0, None)]:
        if value is not None:
            stretch.append(f"{scale.x(step):.1f},{scale.y(value):.1f}")
        elif stretch:
            out.append(f'<polyline class="{style}" points="{" ".join(stretch)}"/>')
            stretch = []
    return out


def _dots(scale: _Scale, curve: Sequence[tuple[float, float | None]], style: str) -> list[str]:
    """Style `hit` is invisible until hovered; the title is the browser's own tooltip."""
    radius = 4 if style == "hit" else 2.5
    return [
        f'<circle class="{style}" cx="{scale.x(step):.1f}" cy="{scale.y(value):.1f}" r="{radius}">'
        f"<title>step {number(step)}: {number(value)}</title></circle>"
        for step, value in curve
        if value is not None
    ]


def _whisker(scale: _Scale, label: str, step: float, value: float, low: float, high: float) -> str:
    x = f"{scale.x(step):.1f}"
    return (
        f'<g class="eval"><line x1="{x}" x2="{x}" y1="{scale.y(low):.1f}" y2="{scale.y(high):.1f}"/>'
        f'<circle cx="{x}" cy="{scale.y(value):.1f}" r="4"><title>{escape(label)}, step {number(step)}: '
        f"{number(value)} ({number(low)} to {number(high)})</title></circle></g>"
    )


def _thin(curve: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    stride = math.ceil(len(curve) / MAX_POINTS) if curve else 1
    kept = list(curve[::stride])
    return kept if not curve or kept[-1] == curve[-1] else [*kept, curve[-1]]


def _smooth(curve: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """A centred moving mean over about a tenth of the curve."""
    half = max(1, len(curve) // 20)
    out: list[tuple[float, float | None]] = []
    for i, (step, _) in enumerate(curve):
        near = [value for _, value in curve[max(0, i - half) : i + half + 1] if value is not None]
        out.append((step, sum(near) / len(near) if near else None))
    return out
