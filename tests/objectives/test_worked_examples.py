"""Every worked number of the documents this project implements (table F of the specification), as printed
there.

Row 15 (exact match of an answer) is in tests/rewards/test_qa.py; row 17 quotes results of a paper
that are not computed from anything. The rest stands here, rounded as printed."""

import math

import pytest
import torch
from maths_helpers import f64, flags, gradient, idx, step_loss
from torch import Tensor

from stepladder.objectives import credit, domains, estimators, kto, policy_gradient, preference, reward_model
from stepladder.objectives.advantages import group_advantages, group_signal

PAIR = (f64(-1.4 + 2.2), f64(-2.2 + 1.8))  # log-ratios +.80 and −.40


def printed(value: Tensor | float, digits: int) -> float:
    return round(float(value), digits)


def test_row_1_dpo_pair() -> None:
    margin = preference.dpo_margin(*PAIR, beta=0.1)
    assert printed(preference.implicit_reward(PAIR[0], beta=0.1), 3) == 0.08
    assert printed(preference.implicit_reward(PAIR[1], beta=0.1), 3) == -0.04
    assert printed(margin, 3) == 0.12
    assert printed(preference.dpo(*PAIR, beta=0.1)[0], 3) == 0.635
    assert printed(preference.dpo(f64(0.0), f64(0.0), beta=0.1)[0], 6) == 0.693147


def test_row_2_gradient_weights() -> None:
    weights = [printed(preference.dpo_gradient_weight(f64(m), beta=0.1), 4) for m in (-0.5, 0.0, 0.12, 1.0)]
    assert weights == [0.0622, 0.0500, 0.0470, 0.0269]


def test_row_2_the_weight_is_the_gradient() -> None:
    chosen = PAIR[0].clone().requires_grad_()
    slope = gradient(preference.dpo(chosen, PAIR[1], beta=0.1)[0], chosen)
    assert printed(-slope, 6) == 0.047004


def test_row_3_dpo_with_larger_beta() -> None:
    margin = preference.dpo_margin(*PAIR, beta=0.5)
    assert printed(preference.implicit_reward(PAIR[0], beta=0.5), 2) == 0.40
    assert printed(preference.implicit_reward(PAIR[1], beta=0.5), 2) == -0.20
    assert printed(margin, 2) == 0.60
    assert printed(preference.dpo(*PAIR, beta=0.5)[0], 3) == 0.437
    assert printed(preference.dpo_gradient_weight(margin, beta=0.5), 3) == 0.177


def test_row_4_simpo() -> None:
    chosen, rejected = f64([[-0.2, -0.3, -0.1]]), f64([[-0.5, -0.6, -0.7, -0.6, -0.8, -0.7]])
    w, w_len = preference.sequence_sums(chosen, torch.ones(1, 3, dtype=torch.bool))
    v, v_len = preference.sequence_sums(rejected, torch.ones(1, 6, dtype=torch.bool))
    assert (printed(w, 2), printed(v, 2)) == (-0.60, -3.90)
    assert (printed(w / w_len, 3), printed(v / v_len, 3)) == (-0.200, -0.650)
    losses, metrics = preference.simpo(w, v, w_len, v_len, beta=2.0, gamma=1.0)
    rewards = (printed(metrics["reward_chosen"], 2), printed(metrics["reward_rejected"], 2))
    assert rewards == (-0.40, -1.30)
    assert printed(losses, 3) == 0.744


def test_row_5_kto_values() -> None:
    zero = torch.zeros((), dtype=torch.float64)
    values = [
        printed(kto.kto_value(f64(r), flags(up), zero, beta=1.0, undesirable_weight=1.5), 3)
        for r, up in ((0.5, 1), (-0.5, 1), (-0.5, 0), (0.5, 0))
    ]
    assert values == [0.622, 0.378, 0.934, 0.566]


def test_row_6_masked_terms() -> None:
    mask = flags(0, 1, 1, 1, 1, 0, 1, 1, 1).unsqueeze(0)
    lp = f64([[-0.1, -0.7, -1.2, -0.3, -0.4, -2.5, -0.6, -0.5, -0.9]])
    losses, metrics = policy_gradient.reinforce(lp, lp, f64(0.8), mask)
    assert int(metrics["tokens"]) == 7
    assert [printed(x, 3) for x in losses[0]] == [0.0, 0.56, 0.96, 0.24, 0.32, 0.0, 0.48, 0.4, 0.72]
    assert printed(losses.sum(), 2) == 3.68
    assert printed(step_loss(losses, mask, "token_mean"), 6) == 0.525714


def test_row_7_domain_scores() -> None:
    z = domains.domain_zscores(f64(10.0, 6.0, 8.0, 0.9, 0.1, 0.5), idx(0, 0, 0, 1, 1, 1))
    assert [printed(x, 2) for x in z] == [1.22, -1.22, 0.0, 1.22, -1.22, 0.0]


def test_row_9_turn_credit() -> None:
    calls = [0.1, 0.1, 0.1, 0.1]
    trajectory = idx(0, 0, 0, 0, 0)
    failed = credit.turn_returns(f64([*calls, 0.0]), trajectory) - 0.45
    solved = credit.turn_returns(f64([*calls, 1.0]), trajectory) - 0.45
    assert (printed(failed[0], 2), printed(failed[-1], 2)) == (-0.05, -0.45)
    assert [printed(x, 2) for x in solved] == [0.95, 0.85, 0.75, 0.65, 0.55]


@pytest.mark.parametrize(
    ("right", "population", "sample"),
    [
        (1, (1.7321, -0.5774), (1.5, -0.5)),
        (2, (1.0, -1.0), (0.866, -0.866)),
        (3, (0.5774, -1.7321), (0.5, -1.5)),
    ],
)
def test_row_10_four_answers_to_17_times_23(
    right: int, population: tuple[float, float], sample: tuple[float, float]
) -> None:
    rewards = f64([float(answer == 17 * 23) for answer in [391] * right + [381] * (4 - right)])
    for ddof, expected in ((0, population), (1, sample)):
        a = group_advantages(rewards, idx(0, 0, 0, 0), ddof=ddof, eps=0.0)
        assert [printed(a[0], 4), printed(a[-1], 4)] == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("right", "population", "sample"),
    [
        (1, (2.2361, -0.4472), (2.0412, -0.4082)),
        (2, (1.4142, -0.7071), (1.2910, -0.6455)),
        (3, (1.0, -1.0), (0.9129, -0.9129)),
        (4, (0.7071, -1.4142), (0.6455, -1.2910)),
        (5, (0.4472, -2.2361), (0.4082, -2.0412)),
    ],
)
def test_row_11_groups_of_six(
    right: int, population: tuple[float, float], sample: tuple[float, float]
) -> None:
    rewards = f64([1.0] * right + [0.0] * (6 - right))
    for ddof, expected in ((0, population), (1, sample)):
        a = group_advantages(rewards, idx(*[0] * 6), ddof=ddof, eps=0.0)
        assert (printed(a[0], 4), printed(a[-1], 4)) == expected


@pytest.mark.parametrize("right", [0, 6])
def test_row_11_all_right_or_all_wrong(right: int) -> None:
    rewards = f64([1.0] * right + [0.0] * (6 - right))
    assert group_advantages(rewards, idx(*[0] * 6)).tolist() == [0.0] * 6


def test_row_12_squared_advantage_without_scaling() -> None:
    totals = []
    for right in range(1, 6):
        rewards = f64([1.0] * right + [0.0] * (6 - right))
        a = group_advantages(rewards, idx(*[0] * 6), scale="none")
        assert float((a**2).sum()) == pytest.approx(6 * group_signal(right / 6, 6)[0])
        totals.append(printed((a**2).sum(), 4))
    assert totals == [0.8333, 1.3333, 1.5, 1.3333, 0.8333]
    assert max(totals) == totals[2]  # at a solve rate of one half


def test_row_13_a_comparison_moves_a_score_by_one_minus_p() -> None:
    chosen, rejected = f64(1.2).requires_grad_(), f64(0.7).requires_grad_()
    losses, _ = reward_model.bradley_terry(chosen, rejected)
    p = reward_model.preference_probability(chosen, rejected).detach()
    assert gradient(losses, chosen).item() == pytest.approx(-(1 - p.item()))
    assert gradient(losses, rejected).item() == pytest.approx(1 - p.item())


def test_row_14_optimal_policy() -> None:
    best = estimators.optimal_policy(f64(0.5, 0.3, 0.2), f64(1.0, 0.0, 2.0), beta=1.0)
    assert [printed(x, 6) for x in best.probabilities] == [0.433268, 0.095634, 0.471098]
    # reward differences are margins of implicit rewards, which is what DPO relies on
    ratio = best.probabilities.log() - f64(0.5, 0.3, 0.2).log()
    margin = preference.dpo_margin(ratio[2:], ratio[1:2], beta=1.0)
    assert margin.item() == pytest.approx(2.0)


def test_row_16_only_the_agents_own_turns_are_trained() -> None:
    own = [1, 1, 0, 1, 0, 1]  # think, search, result, search, page, answer; two tokens each
    mask = torch.tensor([[bool(turn) for turn in own for _ in range(2)]])
    lp = torch.full((1, 12), -0.5, dtype=torch.float64).requires_grad_()
    losses, _ = policy_gradient.reinforce(lp, lp.detach(), f64(1.0), mask)
    slope = gradient(step_loss(losses, mask, "token_mean"), lp)[0]
    assert [i // 2 + 1 for i in range(0, 12, 2) if slope[i] != 0] == [1, 2, 4, 6]


def rollout(target: int, logp: Tensor) -> tuple[list[tuple[int, int]], float]:
    """One episode: action 0 reveals the digit once, the others guess; .15 for having searched, even when
    wrong."""
    steps, context = [], 0
    for _ in range(2):
        z = logp[context]
        p = torch.softmax(z - z.logsumexp(-1, keepdim=True), -1)  # what Categorical(logits=z) draws from
        action = int(torch.multinomial(p.unsqueeze(0), 1, True))
        steps.append((context, action))
        if action == 0 and context == 0:
            context = target + 1
        else:
            return steps, float(action - 1 == target) + (0.15 if context else 0.0)
    raise AssertionError("the second turn always ends the episode")


def test_row_8_the_agent_discovers_search() -> None:
    """The loop of the document, with our advantages and surrogate: all six printed lines, to the digit.

    As printed there the advantages of equal float32 rewards are noise of up to .886 (specification, 0.2 and
    0.3); with the zero guard the document's numbers come out."""
    torch.manual_seed(0)
    logits = torch.zeros(6, 6, requires_grad=True)
    optimiser = torch.optim.SGD([logits], lr=0.5)
    lines = []
    for step in range(400):
        old = torch.log_softmax(logits, -1).detach()
        where, rewards, sizes = [], [], []
        for _ in range(8):
            target = int(torch.randint(0, 5, (1,)))
            for _ in range(12):
                steps, reward = rollout(target, old)
                where += steps
                rewards.append(reward)
                sizes.append(len(steps))
        group = torch.arange(8).repeat_interleave(12)
        per_row = group_advantages(torch.tensor(rewards), group, ddof=1, eps=1e-8)
        advantage = per_row.repeat_interleave(torch.tensor(sizes)).unsqueeze(1)
        context, action = torch.tensor(where).unbind(1)
        mask = torch.ones(len(where), 1, dtype=torch.bool)
        for _ in range(2):
            lp = torch.log_softmax(logits, -1)[context, action].unsqueeze(1)
            losses, _ = policy_gradient.clipped_surrogate(
                lp, old[context, action].unsqueeze(1), advantage, mask
            )
            optimiser.zero_grad()
            step_loss(losses, mask, "token_mean").backward()
            optimiser.step()
        if step % 80 == 0 or step == 399:
            p = torch.softmax(logits, -1).detach()
            right = sum(p[t + 1, t + 1].item() for t in range(5)) / 5
            mean = sum(rewards) / len(rewards)
            lines.append(f"{step:3d} {mean:.3f} {p[0, 0].item():.3f} {right:.3f}")
    assert lines == [
        "  0 0.254 0.172 0.167",
        " 80 0.824 0.959 0.789",
        "160 1.117 0.994 0.956",
        "240 1.129 0.997 0.980",
        "320 1.140 0.998 0.988",
        "399 1.140 0.998 0.991",
    ]


def test_row_1_the_coin_flip_is_ln_2() -> None:
    assert preference.dpo(f64(0.3), f64(0.3), beta=0.7)[0].item() == pytest.approx(math.log(2))
