"""The picture of bench/alarms.py: success with and without the remedy, the signal, and the alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 420, 230, 44, 40
Panel = tuple[str, int | None, Sequence[float], Sequence[float], str, Sequence[float]]
COLOURS = {"left alone": "#c2570c", "with the remedy": "#18794e"}


def picture(panels: Sequence[Panel]) -> str:
    """A panel each: (name, alarm step, success left alone, with the remedy, signal name, signal)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT + 70}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for k, panel in enumerate(panels):
        parts += _panel(k * WIDTH, *panel)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    x: int,
    name: str,
    alarm: int | None,
    alone: Sequence[float],
    remedy: Sequence[float],
    signal_name: str,
    signal: Sequence[float],
) -> list[str]:
    steps = max(len(alone), len(remedy))
    top = max([0.05, *alone, *remedy, *(v for v in signal if v == v)])

    def at(step: float) -> float:
        return x + LEFT + (WIDTH - LEFT - 16) * step / steps

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top)

    out = [f'<text x="{x + LEFT}" y="24" font-size="14" font-weight="bold">{escape(name)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = top * share
        out.append(f'<line x1="{at(0)}" y1="{y(value)}" x2="{at(steps)}" y2="{y(value)}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{x + LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.2f}</text>')
    if alarm is not None:
        out.append(
            f'<line x1="{at(alarm)}" y1="{TOP}" x2="{at(alarm)}" y2="{TOP + HEIGHT}" stroke="#b3261e"/>'
        )
        out.append(f'<text x="{at(alarm) + 4}" y="{TOP + 12}" fill="#b3261e">alarm, step {alarm}</text>')
    out.append(_line([(at(i), y(v)) for i, v in enumerate(signal, 1) if not math.isnan(v)], "#667080", True))
    for values, colour in zip((alone, remedy), COLOURS.values(), strict=True):
        out.append(_line([(at(i), y(v)) for i, v in enumerate(values, 1)], colour, False))
    names = [*((f"success, {n}", c) for n, c in COLOURS.items()), (f"{signal_name} (dashed)", "#667080")]
    for i, (text, colour) in enumerate(names):
        place = f'x="{x + LEFT + 150 * (i % 2)}" y="{TOP + HEIGHT + 18 + 15 * (i // 2)}"'
        out.append(f'<text {place} fill="{colour}" font-size="11">{escape(text)}</text>')
    return out


def _line(points: Sequence[tuple[float, float]], colour: str, dashed: bool) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
