"""Preference losses where the answer is known: a policy on a few answers, trained with the library's losses
and optimiser until it stands still, beside what the mathematics says it must become.

python bench/preference.py            # writes bench/results/preference.md and bench/results/preference.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from stepladder.objectives import preference as losses
from stepladder.objectives.estimators import optimal_policy
from stepladder.objectives.kto import kto, kto_reference_point
from stepladder.policies.optimizer import MasterOptimizer

RESULTS = Path(__file__).parent / "results"
REWARDS = torch.tensor([1.5, 0.2, 0.1, 0.0, -0.1, -0.2])
LENGTHS = torch.tensor([3, 8, 2, 5, 4, 6])  # tokens of each answer
EVERY = 10  # steps between two points of a curve


@dataclass
class Table:
    """A policy on six answers to one prompt or two: its logits [prompts, 6] are all it has. The reference is
    how it began. An answer's number is 6 * prompt + place."""

    logits: torch.nn.Parameter
    reference: Tensor
    curve: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def new(cls, seed: int, prompts: int = 1) -> Table:
        start = torch.randn(prompts, len(REWARDS), generator=torch.Generator().manual_seed(seed))
        return cls(torch.nn.Parameter(start.clone()), start.log_softmax(1).flatten())

    @property
    def logprobs(self) -> Tensor:
        return self.logits.log_softmax(1).flatten()

    @property
    def log_ratios(self) -> Tensor:
        return self.logprobs - self.reference


def train(
    table: Table, loss: Callable[[], Tensor], measure: Callable[[], float], *, steps: int, rate: float
) -> Table:
    """AdamW on the whole data set at every step; `measure` every EVERY steps."""
    optimizer = MasterOptimizer({"logits": table.logits}, max_grad_norm=1e9)
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                table.curve.append((step, measure()))
        if step < steps:
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step(rate)
    return table


def bradley_terry_pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(winners, losers, how often) of `count` pairs drawn from sigmoid(r_i - r_j): one row a kind of pair."""
    generator = torch.Generator().manual_seed(seed)
    n = len(REWARDS)
    first = torch.randint(n, (count,), generator=generator)
    second = (first + torch.randint(1, n, (count,), generator=generator)) % n
    wins = torch.rand(count, generator=generator) < torch.sigmoid(REWARDS[first] - REWARDS[second])
    winner, loser = torch.where(wins, first, second), torch.where(wins, second, first)
    kinds, counts = torch.unique(winner * n + loser, return_counts=True)
    return kinds // n, kinds % n, counts.float() / count


def dpo_run(*, beta: float, steps: int, naive: bool = False, pairs: int = 60_000) -> Table:
    """DPO on pairs drawn from Bradley-Terry; the curve is the total variation from pi_ref exp(r/beta)/Z.

    `naive`: raise the winner, lower the loser, and nothing else.
    """
    table = Table.new(seed=4)
    winner, loser, share = bradley_terry_pairs(pairs)
    goal = optimal_policy(table.reference.exp(), REWARDS, beta=beta).probabilities

    def loss() -> Tensor:
        if naive:
            each = table.logprobs[loser] - table.logprobs[winner]
        else:
            each, _ = losses.dpo(table.log_ratios[winner], table.log_ratios[loser], beta=beta)
        return (each * share).sum()

    def distance() -> float:
        return float((table.logprobs.exp() - goal).abs().sum() / 2)

    return train(table, loss, distance, steps=steps, rate=0.02)


def margin_run(loss_name: str, *, parameter: float, steps: int) -> Table:
    """Answer 0 always preferred to answer 1; the curve is the difference of their log-ratios."""
    table = Table.new(seed=1)

    def loss() -> Tensor:
        chosen, rejected = table.log_ratios[:1], table.log_ratios[1:2]
        if loss_name == "ipo":
            each, _ = losses.ipo(chosen, rejected, LENGTHS[:1], LENGTHS[1:2], tau=parameter, average=False)
        else:
            each, _ = losses.dpo(chosen, rejected, beta=parameter)
        return each.mean()

    def margin() -> float:
        return float(table.log_ratios[0] - table.log_ratios[1])

    return train(table, loss, margin, steps=steps, rate=0.05)


def simpo_run(*, beta: float, gamma: float, steps: int) -> Table:
    """The better half always preferred to the worse half; the curve is the smallest margin a token, times
    beta, over all pairs."""
    table = Table.new(seed=2)
    winner = torch.arange(3).repeat_interleave(3)
    loser = torch.arange(3, 6).repeat(3)

    def loss() -> Tensor:
        each, _ = losses.simpo(
            table.logprobs[winner],
            table.logprobs[loser],
            LENGTHS[winner],
            LENGTHS[loser],
            beta=beta,
            gamma=gamma,
        )
        return each.mean()

    def margin() -> float:
        average = table.logprobs / LENGTHS
        return float((beta * (average[winner] - average[loser])).min())

    return train(table, loss, margin, steps=steps, rate=0.02)


def kto_run(*, beta: float, steps: int, desirable: Sequence[int], undesirable: Sequence[int]) -> Table:
    """One answer to each of two prompts, all marked good or all marked bad; the curve is their mean
    log-ratio above z0, which comes from each answer after the prompt of the other."""
    table = Table.new(seed=3, prompts=2)
    rows = torch.tensor([*desirable, *undesirable])
    up = torch.tensor([True] * len(desirable) + [False] * len(undesirable))
    places = rows % len(REWARDS)
    mismatched = rows - places + places.roll(1)

    def point() -> Tensor:
        return kto_reference_point(table.log_ratios[mismatched])

    def loss() -> Tensor:
        each, _ = kto(table.log_ratios[rows], up, point(), beta=beta)
        return each.mean()

    def above() -> float:
        return float((table.log_ratios[rows] - point()).mean())

    return train(table, loss, above, steps=steps, rate=0.02)


# -- the table and the picture ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[tuple[str, Sequence[tuple[int, float]]]]
    level: tuple[str, float] | None = None


def panels(steps: int) -> tuple[list[Panel], list[str]]:
    """All experiments: what is drawn, and the rows of the table."""
    dpo, naive = dpo_run(beta=1.0, steps=steps), dpo_run(beta=1.0, steps=steps, naive=True)
    det_dpo, det_ipo = (margin_run(n, parameter=p, steps=steps) for n, p in (("dpo", 0.5), ("ipo", 0.25)))
    simpo, flat = simpo_run(beta=2.0, gamma=1.0, steps=steps), simpo_run(beta=2.0, gamma=0.0, steps=steps)
    good = kto_run(beta=0.5, steps=steps, desirable=(0, 7), undesirable=())
    bad = kto_run(beta=0.5, steps=steps, desirable=(), undesirable=(4, 11))
    half = len(det_dpo.curve) // 2

    def best(table: Table) -> float:
        return float(table.logprobs.detach()[0].exp())

    rows = [
        _row("DPO, pairs drawn from Bradley-Terry", "total variation from π_ref·exp(r/β)/Z", "< .02", dpo),
        _row("naive: raise the winner, lower the loser", "the same distance", "degenerates", naive),
        _row(
            "", f"probability of the best answer (DPO: {best(dpo):.3f})", "1: the rest is gone", best(naive)
        ),
        _row("IPO, one answer always preferred", "log-ratio margin", "1/(2τ) = 2", det_ipo),
        _row("DPO, the same", "log-ratio margin at half time", "", det_dpo.curve[half][1]),
        _row("", "at the end", "grows without end", det_dpo),
        _row("SimPO, γ = 1", "smallest β·margin a token", "> γ = 1", simpo),
        _row("SimPO, γ = 0", "the same", "behind it at every step", flat),
        _row("KTO, good answers alone", "their log-ratio above z0", "> 0", good),
        _row("KTO, bad answers alone", "their log-ratio above z0", "< 0", bad),
    ]
    return [
        Panel("distance from the closed form", [("DPO", dpo.curve), ("naive", naive.curve)]),
        Panel(
            "margin, one always preferred", [("DPO", det_dpo.curve), ("IPO", det_ipo.curve)], ("1/(2τ)", 2)
        ),
        Panel("SimPO: β·margin a token", [("γ = 1", simpo.curve), ("γ = 0", flat.curve)], ("γ", 1)),
        Panel("KTO: log-ratio above z0", [("good alone", good.curve), ("bad alone", bad.curve)], ("z0", 0)),
    ], rows


def _row(what: str, quantity: str, expected: str, got: Table | float) -> str:
    value = got if isinstance(got, float) else got.curve[-1][1]
    return f"| {what} | {quantity} | {expected} | {value:.4g} |"


COLOURS = ("#2b6cb0", "#dd6b20")
WIDTH, HEIGHT, LEFT, TOP, INNER = 340, 220, 44, 44, 276


def svg(drawn: Sequence[Panel]) -> str:
    """The panels two by two."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for k, panel in enumerate(drawn):
        x, y = WIDTH * (k % 2), HEIGHT * (k // 2)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> str:
    values = [v for _, curve in panel.curves for _, v in curve] + ([panel.level[1]] if panel.level else [])
    low, high, last = min(*values, 0.0), max(values), panel.curves[0][1][-1][0]
    bottom = HEIGHT - 30

    def at(step: float, value: float) -> str:
        share = (value - low) / ((high - low) or 1.0)
        return f"{LEFT + INNER * step / last:.1f},{bottom - (bottom - TOP) * share:.1f}"

    parts = [f'<text x="{LEFT}" y="16" fill="#222" font-weight="bold">{escape(panel.title)}</text>']
    for value in (low, high):
        y = at(0, value).split(",")[1]
        parts.append(f'<text x="{LEFT - 6}" y="{y}" fill="#555" text-anchor="end">{value:.3g}</text>')
    parts.append(
        f'<text x="{LEFT + INNER}" y="{HEIGHT - 12}" fill="#555" text-anchor="end">{last} steps</text>'
    )
    if panel.level is not None:
        ends = [at(0, panel.level[1]), at(last, panel.level[1])]
        parts.append(
            f'<polyline points="{" ".join(ends)}" fill="none" stroke="#888" stroke-dasharray="4 3"/>'
        )
        x, y = ends[1].split(",")
        parts.append(
            f'<text x="{x}" y="{float(y) - 4:.1f}" fill="#555" text-anchor="end">{panel.level[0]}</text>'
        )
    for i, (name, curve) in enumerate(panel.curves):
        points = " ".join(at(*point) for point in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.6"/>')
        parts.append(f'<text x="{LEFT + 90 * i}" y="32" fill="{COLOURS[i]}">{escape(name)}</text>')
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    drawn, rows = panels(options.steps)
    text = [
        "# Preference losses where the answer is known",
        "",
        "A policy on six answers (its logits are its parameters), the library's losses and its AdamW on the "
        f"whole data set, {options.steps} steps. Made by `python bench/preference.py`.",
        "",
        "![curves](preference.svg)",
        "",
        "| run | quantity | the mathematics says | measured at the end |",
        "|---|---|---|---|",
        *rows,
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "preference.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (RESULTS / "preference.svg").write_text(svg(drawn), encoding="utf-8")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
