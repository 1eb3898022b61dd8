"""Surrogates: the end-to-end case by hand, gradients at ratio 1 and away from it, many updates on one batch.

By hand: θ [−1, −.5], old [−1.1, −.5], A = +1: log-ratios .1, 0; r = 1.105171, 1; losses −1.105171, −1. θ
[−.8, −1.2, −.3], old [−.8, −1, −.6], A = −1: log-ratios 0, −.2, .3; r = 1, .818731, 1.349859; losses the
same (for A < 0 a ratio above 1 + ε is not clipped). Sums −2.105171 and 3.168590."""

import itertools

import pytest
import torch
from maths_batches import make
from maths_helpers import f64, flags, gradient, idx, step_loss
from torch import Tensor

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.objectives import corrections, mirror, policy_gradient
from stepladder.objectives.advantages import group_advantages
from stepladder.objectives.policy_gradient import SURROGATES, cispo, clipped_surrogate, ratios
from stepladder.objectives.reduce import aggregate, step_denominators, trained_lengths

CURRENT = f64([[-1.0, -0.5, 0.0], [-0.8, -1.2, -0.3]])
OLD = f64([[-1.1, -0.5, 9.0], [-0.8, -1.0, -0.6]])
MASK = torch.stack([flags(1, 1, 0), flags(1, 1, 1)])
SIGN = f64(1.0, -1.0)
ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "constant", "expected"),
    [
        ("sequence_mean", None, (-2.105171 / 2 + 3.168590 / 3) / 2),
        ("token_mean", None, (-2.105171 + 3.168590) / 5),
        ("constant", 4.0, (-2.105171 + 3.168590) / 8),
        ("sequence_sum", None, (-2.105171 + 3.168590) / 2),
    ],
)
def test_the_worked_case_under_each_aggregation(mode: str, constant: float | None, expected: float) -> None:
    advantages = group_advantages(SIGN, idx(0, 0), ddof=0, eps=0.0)
    losses, _ = clipped_surrogate(CURRENT, OLD, advantages, MASK)
    assert step_loss(losses, MASK, mode, constant=constant).item() == pytest.approx(expected, abs=1e-6)


def test_gspo_takes_the_geometric_mean_of_the_trained_tokens() -> None:
    # s = exp(.1/2), exp(.1/3); A = +1 is clipped at 1.0004, A = −1 is not: (−1.0004 + 1.033895)/2
    losses, _ = clipped_surrogate(
        CURRENT, OLD, SIGN, MASK, ratio_level="sequence", clip_low=3e-4, clip_high=4e-4
    )
    assert step_loss(losses, MASK, "sequence_mean").item() == pytest.approx(0.0167476, abs=1e-6)


def test_rloo_ratio_is_the_product_and_its_loss_that_of_one_action() -> None:
    # ρ = e^.1 both; A = +1, ε .2: −1.105171; A = −1: +1.105171; the mean over the two trajectories is 0
    lp = CURRENT.clone().requires_grad_()
    losses, _ = clipped_surrogate(lp, OLD, f64(1.0, -3.0), MASK, ratio_level="product")
    loss = step_loss(losses, MASK, "sequence_sum")
    assert loss.item() == pytest.approx((-1.105171 + 3 * 1.105171) / 2, abs=1e-6)
    # d(−ρA)/dlp_t = −ρA for every token of the trajectory
    assert gradient(loss, lp)[0].tolist() == pytest.approx([-1.105171 / 2, -1.105171 / 2, 0.0], abs=1e-6)


def test_cispo_weights_by_the_capped_ratio() -> None:
    # (1.105171·1 + 1·.5 − 1·.8 − .818731·1.2 − 1.28·.3) / 5
    losses, metrics = cispo(CURRENT, OLD, SIGN, MASK)
    assert step_loss(losses, MASK, "token_mean").item() == pytest.approx(-0.1122612, abs=1e-6)
    assert metrics["clip_high"].item() == pytest.approx(0.2)


def cispo_weight(log_ratio: float, **options: object) -> float:
    """The factor of A·∇lp for one token with this log-ratio."""
    lp = f64([[0.0]]).requires_grad_()
    return -gradient(cispo(lp, f64([[-log_ratio]]), f64(1.0), ONE, **options)[0], lp).item()


def test_cispo_cap_relative_and_absolute() -> None:
    assert cispo_weight(3.0, clip_high=0.28) == pytest.approx(1.28)
    assert cispo_weight(3.0, clip_high=5.0) == pytest.approx(6.0)
    assert cispo_weight(3.0, clip_high=5.0, absolute=True) == pytest.approx(5.0)
    assert cispo_weight(-3.0) == pytest.approx(0.049787, abs=1e-6)  # no lower bound in the paper
    assert cispo_weight(-3.0, clip_low=0.2) == pytest.approx(0.8)


def test_cispo_gradient_is_that_of_its_frozen_weight() -> None:
    b = make(3, 2, 2, 4)
    lp = b.lp.clone().requires_grad_()
    a = group_advantages(b.rewards, b.group)
    slope = gradient(cispo(lp, b.proximal, a, b.mask)[0], lp)
    weight = (b.lp - b.proximal).exp().clamp(max=1.28)
    assert torch.allclose(slope, torch.where(b.mask, -weight * a.unsqueeze(1), 0.0))


def test_metrics_count_where_the_clip_takes_the_gradient() -> None:
    log_ratio = f64([0.5, 0.5, -0.5, -0.5, 0.0]).unsqueeze(0)
    a = f64([[1.0, -1.0, 1.0, -1.0, 0.0]])
    lp = log_ratio.clone().requires_grad_()
    losses, metrics = clipped_surrogate(lp, torch.zeros_like(lp), a, torch.ones(1, 5, dtype=torch.bool))
    assert (gradient(losses, lp)[0] == 0).tolist() == [True, False, False, True, True]
    assert metrics["clip_high"].item() == pytest.approx(0.2)
    assert metrics["clip_low"].item() == pytest.approx(0.2)
    assert metrics["zero_advantage"].item() == pytest.approx(0.2)
    assert metrics["ratio_max"].item() == pytest.approx(1.6487213)
    # k3 of the drift: (e^.5 − 1.5)·2/5 + (e^−.5 − .5)·2/5
    assert metrics["approx_kl"].item() == pytest.approx(0.4 * (0.1487213 + 0.1065307), abs=1e-6)


def test_decoupled_with_proximal_equal_to_behaviour_is_ppo() -> None:
    b = make(5, 2, 2, 4)
    a = group_advantages(b.rewards, b.group)
    losses, _ = clipped_surrogate(b.lp, b.proximal, a, b.mask)
    w, _ = corrections.correction_weights(b.proximal, b.proximal, b.mask, correction="token_cap")
    assert torch.equal(w * losses, losses)


def test_decoupled_on_policy_carries_the_weight_of_the_sampler() -> None:
    b = make(6, 1, 2, 4)
    a = group_advantages(b.rewards, b.group)
    lp = b.lp.clone().requires_grad_()
    losses, _ = clipped_surrogate(lp, b.lp, a, b.mask)
    w, _ = corrections.correction_weights(b.lp, b.behaviour, b.mask, correction="token_cap", high=1e9)
    expected = torch.where(b.mask, -(b.lp - b.behaviour).exp() * a.unsqueeze(1), 0.0)
    assert torch.allclose(gradient(w * losses, lp), expected)


def test_a_trajectory_over_two_micro_batches_needs_its_whole_ratio_passed_in() -> None:
    lp, old, mask = f64([[-1.0, -0.5, -0.7, -0.9]]), f64([[-1.2, -0.4, -0.9, -0.8]]), torch.ones(1, 4) > 0
    whole = policy_gradient.log_ratios(lp, old, mask)
    total, length = whole.sum(-1), f64(4.0)
    for level, mode in (("sequence", "sequence_mean"), ("product", "sequence_sum")):
        x = lp.clone().requires_grad_()
        losses, _ = clipped_surrogate(x, old, f64(1.0), mask, ratio_level=level)
        loss = step_loss(losses, mask, mode)
        slope = gradient(loss, x)
        d = step_denominators(idx(2, 2), mode=mode, trajectory_index=idx(0, 0))
        parts, slopes = [], []
        for i, half in enumerate((slice(0, 2), slice(2, 4))):
            x = lp[:, half].clone().requires_grad_()
            part, _ = clipped_surrogate(
                x,
                old[:, half],
                f64(1.0),
                mask[:, half],
                ratio_level=level,
                trajectory_log_ratio=total,
                trajectory_length=length,
            )
            parts.append(aggregate(part, mask[:, half], d[i : i + 1]))
            slopes.append(gradient(parts[-1], x))
        assert sum(parts).item() == pytest.approx(loss.item())
        assert torch.allclose(torch.cat(slopes, dim=1), slope)


def test_kimi_surrogate_has_the_published_coefficient() -> None:
    lp = f64([[-1.0, -2.0], [-0.5, -0.3]]).requires_grad_()
    prox = f64([[-1.1, -2.1], [-0.5, -0.2]])  # log-ratios .2 and −.1
    mask = torch.ones(2, 2, dtype=torch.bool)
    losses = mirror.squared_surrogate(lp, prox, f64(1.0, 0.0), f64(0.5, 0.5), mask, tau=0.5)
    assert gradient(losses, lp).tolist() == [pytest.approx([-0.4, -0.4]), pytest.approx([0.45, 0.45])]


# Rows of the table


def losses_of(
    row: Algorithm, lp: Tensor, old: Tensor, a: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return SURROGATES[row.surrogate](
        lp,
        old,
        a,
        mask,
        clip_low=row.clip_low,
        clip_high=row.clip_high,
        ratio_level=row.ratio_level,
        dual_clip=row.dual_clip,
        absolute=row.clip_absolute,
    )


def toy() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits of a table policy, tokens sampled from it, mask, advantages): 2 groups of 4, up to 6 tokens."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5, generator=g, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    tokens = torch.multinomial(p, 8, replacement=True, generator=g).t()
    mask = torch.arange(6).unsqueeze(0) < torch.randint(3, 7, (8, 1), generator=g)
    rewards = (tokens * mask).sum(-1).double()
    return logits, tokens, mask, group_advantages(rewards, idx(0, 0, 0, 0, 1, 1, 1, 1))


def scored(logits: Tensor, tokens: Tensor) -> Tensor:
    logp = torch.log_softmax(logits, -1)
    return logp[torch.arange(tokens.shape[1]).expand_as(tokens), tokens]


def test_after_several_updates_on_one_batch_the_rows_clip_and_differ() -> None:
    """At ratio 1 ppo, gspo, cispo and dapo nearly agree; after four updates they must not."""
    start, tokens, mask, a = toy()
    old = scored(start, tokens)
    names = ("ppo", "gspo", "cispo", "dapo")
    shares: dict[str, list[float]] = {}
    for name in names:
        row, logits = ALGORITHMS[name], start.clone().requires_grad_()
        d = step_denominators(trained_lengths(mask), mode=row.aggregation)
        shares[name] = []
        for _ in range(5):
            losses, metrics = losses_of(row, scored(logits, tokens), old, a, mask)
            shares[name].append((metrics["clip_low"] + metrics["clip_high"]).item())
            step = torch.autograd.grad(aggregate(losses, mask, d), logits)[0]
            logits = (logits - 1.5 * step).detach().requires_grad_()
    assert all(seen[0] == 0.0 for seen in shares.values())
    assert all(seen[-1] > 0.0 for seen in shares.values()), shares
    # one common point away from the start: the four gradients differ pairwise by at least a tenth of their
    # length
    drifted = (start + 0.6 * torch.randn(6, 5, generator=torch.Generator().manual_seed(2))).requires_grad_()
    slopes = {}
    for name in names:
        row = ALGORITHMS[name]
        d = step_denominators(trained_lengths(mask), mode=row.aggregation)
        losses, _ = losses_of(row, scored(drifted, tokens), old, a, mask)
        slopes[name] = gradient(aggregate(losses, mask, d), drifted)
    for x, y in itertools.combinations(names, 2):
        gap = (slopes[x] - slopes[y]).norm() / torch.maximum(slopes[x].norm(), slopes[y].norm())
        assert gap > 0.1, (x, y, gap)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_row_runs_and_its_first_update_is_reinforce(name: str) -> None:
    row = ALGORITHMS[name]
    start, tokens, mask, a = toy()
    logits = start.clone().requires_grad_()
    d = step_denominators(
        trained_lengths(mask), mode=row.aggregation, constant=6, group_index=idx(0, 0, 0, 0, 1, 1, 1, 1)
    )
    losses, _ = losses_of(row, scored(logits, tokens), scored(start, tokens), a, mask)
    plain = -(a.unsqueeze(1) * scored(logits, tokens) * mask / d.unsqueeze(1)).sum()
    assert torch.allclose(gradient(aggregate(losses, mask, d), logits), gradient(plain, logits))


def test_a_geometric_ratio_ignores_how_long_the_row_is() -> None:
    short, long = f64([[0.1, 0.1]]), f64([[0.1] * 50])
    level = [ratios(x, torch.ones_like(x) > 0, ratio_level="sequence")[0, 0].item() for x in (short, long)]
    assert level[0] == pytest.approx(level[1])
