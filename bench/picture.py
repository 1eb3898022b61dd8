"""Draw the README's picture from a run folder: success by rung and family, as a self-contained SVG.

python bench/picture.py runs/calculator docs/images/calculator.svg
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

RUNGS = (
    ("raw", "#9aa0a6"),
    ("few-shot", "#c58af9"),
    ("sft", "#f6ad55"),
    ("rejection_sampling", "#4299e1"),
    ("preference", "#805ad5"),
    ("rl", "#38a169"),
)
LABELS = {
    "raw": "raw model",
    "few-shot": "shown examples",
    "sft": "after SFT (converged)",
    "rejection_sampling": "rejection sampling",
    "preference": "DPO",
    "rl": "after RL",
}
LEFT, BAR, WIDTH = 190, 7, 460


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    results = {line["rung"]: line for line in map(json.loads, lines)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg(results), encoding="utf-8")


def svg(results: dict[str, Any]) -> str:
    """Horizontal bars: a block for all families together, with 95 % intervals, then one for each family."""
    row = (BAR + 1) * sum(r in results for r, _ in RUNGS) + 8
    families = sorted(results["rl"]["by_domain"], key=lambda f: -results["sft"]["by_domain"][f]["success"])
    blocks = [("all families", {r: results[r]["success"] for r, _ in RUNGS if r in results})]
    for family in families:
        values = {r: results[r]["by_domain"].get(family, {}).get("success") for r, _ in RUNGS if r in results}
        blocks.append((family.replace("_", " "), values))
    height = 70 + row * len(blocks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    x = 10
    for rung, colour in RUNGS:
        if rung in results:
            parts.append(f'<rect x="{x}" y="12" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{x + 14}" y="21" fill="#222">{escape(LABELS[rung])}</text>')
            x += 32 + 6 * len(LABELS[rung])
    for share in (0, 25, 50, 75, 100):
        at = LEFT + WIDTH * share / 100
        parts.append(f'<line x1="{at}" y1="34" x2="{at}" y2="{height - 24}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{at}" y="{height - 8}" fill="#555" text-anchor="middle">{share} %</text>')
    for k, (name, values) in enumerate(blocks):
        top = 40 + row * k
        weight = ' font-weight="bold"' if k == 0 else ""
        place = f'x="{LEFT - 10}" y="{top + 19}" fill="#222" text-anchor="end"'
        parts.append(f"<text {place}{weight}>{escape(name)}</text>")
        for i, (rung, colour) in enumerate(r for r in RUNGS if r[0] in values):
            if values[rung] is not None:
                width = max(1.0, WIDTH * values[rung])
                y = top + i * (BAR + 1)
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
                if k == 0:
                    low, high = (LEFT + WIDTH * v for v in results[rung]["interval"])
                    middle = y + BAR / 2
                    line = f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="#222"/>'
                    parts.append(line)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
