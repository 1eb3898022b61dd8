"""One update on preferences: what it computes, that no cut of the batch matters, and what it refuses.

Faults of the list are named where a test stands for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from spine import alone, sample, tiny_policy
from torch import Tensor

from stepladder.errors import InvariantError
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.recipe.preference import PreferenceSection
from stepladder.rungs.preference.data import as_pair, mismatch
from stepladder.rungs.preference.update import (
    Answer,
    AnswerScores,
    Judged,
    Pair,
    check_start,
    cut,
    kto_update,
    pair_loss,
    preference_update,
    score_pairs,
)

LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "cdpo": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.2, "sft_weight": 0.5},
    "ipo": {},
    "simpo": {"simpo": {"gamma": 1.0}},
    "orpo": {},
}


def section(loss: str = "dpo", **settings: Any) -> PreferenceSection:
    return PreferenceSection(pairs=1, validation=0, loss=loss, **{**LOSSES.get(loss, {}), **settings})  # type: ignore[arg-type]


def random_pairs(count: int, *, seed: int = 0, reference: bool = True) -> list[Pair]:
    """Pairs of different lengths; the reference is some numbers near those of nobody in particular."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(8, 90, (n,), generator=generator).tolist()

    out = []
    for i in range(count):
        prompt = draw(3 + i % 3)
        sides = [
            sample([*prompt, *draw(1 + (2 * i + 3 * k) % 5)], len(prompt), group=f"p{i}") for k in range(2)
        ]
        pair = as_pair(*sides)
        out.append(with_noise(pair, generator) if reference else pair)
    return out


def with_noise(pair: Pair, generator: torch.Generator) -> Pair:
    def known(answer: Answer) -> Answer:
        return Answer(answer.sample, -5 + 0.5 * torch.randn(answer.sample.num_trained, generator=generator))

    return Pair(known(pair.chosen), known(pair.rejected))


def own_reference(policy: Policy, pairs: Sequence[Pair]) -> list[Pair]:
    """The reference that the policy itself is."""

    def known(answer: Answer) -> Answer:
        return Answer(answer.sample, alone(policy, answer.sample).detach())

    return [Pair(known(pair.chosen), known(pair.rejected)) for pair in pairs]


def judged(pairs: Sequence[Pair]) -> list[Judged]:
    """Both sides of each pair as single answers, each compared with the row before."""
    answers = [(answer, i == 0) for pair in pairs for i, answer in enumerate(pair.answers)]
    out = []
    for i, (answer, up) in enumerate(answers):
        other = answers[i - 2][0].sample  # the same side of the pair before: another prompt
        wrong = mismatch(answer.sample, other)
        known = None if answer.reference is None else torch.full((wrong.num_trained,), -4.5)
        out.append(Judged(answer, Answer(wrong, known), up))
    return out


class Watching(MasterOptimizer):
    """Keeps the gradients of a step instead of taking it."""

    def step(self, lr: float) -> float:
        self.seen = {name: t.grad.clone() for name, t in self.masters.items() if t.grad is not None}
        self.clear()
        return float(sum(g.pow(2).sum() for g in self.seen.values()) ** 0.5)


def update(
    policy: Policy, pairs: Sequence[Pair], settings: PreferenceSection, *, budget: int = 4096
) -> tuple[dict[str, float], dict[str, Tensor]]:
    optimizer = Watching(policy.trainable())
    metrics = preference_update(
        policy, optimizer, pairs, pair_loss(settings), learning_rate=0.0, token_budget=budget
    )
    return metrics, optimizer.seen


def kto_step(
    policy: Policy, batch: Sequence[Judged], *, budget: int = 4096, **more: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    optimizer = Watching(policy.trainable())
    metrics = kto_update(
        policy, optimizer, batch, section("kto", **more), learning_rate=0.0, token_budget=budget
    )
    return metrics, optimizer.seen


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in other:
        noise = 2e-6 * max(1.0, float(other[name].abs().max()))  # float32's, of sums of the largest terms
        torch.testing.assert_close(one[name], other[name], rtol=2e-4, atol=noise)


# -- the value --------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_models_own_log_probabilities(policy: Policy) -> None:
    """Each answer scored alone by the plain model, summed; then DPO as it is written down."""
    pairs = random_pairs(5)
    want = []
    for pair in pairs:
        ratios = [
            float(alone(policy, a.sample).detach().double().sum() - a.reference.double().sum())  # type: ignore[union-attr]
            for a in pair.answers
        ]
        want.append(math.log1p(math.exp(-0.1 * (ratios[0] - ratios[1]))))
    metrics, _ = update(policy, pairs, section("dpo"))
    assert metrics["loss"] == pytest.approx(sum(want) / 5, abs=1e-5)
    assert metrics["pairs"] == 5


def test_fault_71_at_step_0_the_loss_is_ln_2_and_the_margins_are_0(policy: Policy) -> None:
    pairs = own_reference(policy, random_pairs(4))
    for loss, value in (("dpo", math.log(2)), ("cdpo", math.log(2)), ("ipo", 25.0)):
        metrics, _ = update(policy, pairs, section(loss))
        assert metrics["loss"] == pytest.approx(value, abs=1e-5 if loss != "ipo" else 1e-3)
        assert metrics["margin"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_check_at_step_0_stops_a_run_whose_reference_is_not_its_policy(policy: Policy) -> None:
    pairs = own_reference(policy, random_pairs(3))
    seen: list[AnswerScores] = []

    def check(scores: AnswerScores) -> None:
        seen.append(scores)
        check_start(scores, limit=1e-4)

    loss = pair_loss(section())
    optimizer = MasterOptimizer(policy.trainable())
    preference_update(policy, optimizer, pairs, loss, learning_rate=0.0, token_budget=4096, before_step=check)
    assert len(seen) == 2  # both sides
    off = pairs[1].rejected
    assert off.reference is not None
    pairs[1] = Pair(pairs[1].chosen, Answer(off.sample, off.reference + 1e-3))
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    with pytest.raises(InvariantError, match=r"ln 2 = 0.6931.*dropout"):
        preference_update(
            policy, optimizer, pairs, loss, learning_rate=1.0, token_budget=4096, before_step=check
        )
    for name, p in policy.trainable().items():  # the step was not taken, and nothing of it is left
        assert torch.equal(p, before[name])
        assert p.grad is None
    with pytest.raises(InvariantError):
        check_start(AnswerScores(*[torch.tensor([float("nan")])] * 4, True), limit=1.0)


@pytest.mark.parametrize("loss", [*LOSSES, "kto"])
def test_fault_77_every_loss_has_a_gradient_at_step_0(loss: str) -> None:
    """Scores computed outside the differentiated function have none."""
    policy = tiny_policy()
    pairs = own_reference(policy, random_pairs(3))
    if loss == "kto":
        metrics, _ = kto_step(policy, judged(pairs))
    else:
        metrics, _ = update(policy, pairs, section(loss))
    assert metrics["grad_norm"] > 1e-3


def test_fault_75_sums_for_dpo_and_averages_for_simpo() -> None:
    """Lengths 2 and 4, every log p -1: DPO, summed, reference 0, beta .1: -log s(.1 (-2+4)) = .5981;
    SimPO, averaged, beta 2, gamma 1: -log s(2 (-1+1) - 1) = 1.3133."""

    def scores(length: int) -> AnswerScores:
        zero = torch.zeros(1)
        return AnswerScores(torch.tensor([float(-length)]), zero, torch.tensor([length]), zero, True)

    dpo, _ = pair_loss(section("dpo"))(scores(2), scores(4))
    simpo, _ = pair_loss(section("simpo", beta=2.0, simpo={"gamma": 1.0}))(scores(2), scores(4))
    assert float(dpo) == pytest.approx(-math.log(1 / (1 + math.exp(-0.2))), abs=1e-6)
    assert float(simpo) == pytest.approx(math.log1p(math.e), abs=1e-6)


def test_each_setting_reaches_its_loss() -> None:
    """Fault 70, an option that changes nothing: here every one does, and as the formula says."""
    one = torch.ones(1)
    chosen = AnswerScores(-8 * one, -10 * one, torch.tensor([4]), 0 * one, True)
    rejected = AnswerScores(-9 * one, -8 * one, torch.tensor([2]), 0 * one, True)
    h = (-8 + 10) - (-9 + 8)  # 3
    averaged = 2 / 4 - (-1) / 2  # 1

    def value(loss: str, **settings: Any) -> float:
        settings = {**LOSSES[loss], **settings}
        made = PreferenceSection(pairs=1, validation=0, loss=loss, **settings)  # type: ignore[arg-type]
        return float(pair_loss(made)(chosen, rejected)[0])

    def low(x: float) -> float:
        return math.log1p(math.exp(-x))

    assert value("dpo", beta=0.5) == pytest.approx(low(0.5 * h))
    assert value("dpo", per_token=True, beta=0.5) == pytest.approx(low(0.5 * averaged))
    assert value("dpo", sft_weight=0.3) == pytest.approx(low(0.1 * h) + 0.3 * 8 / 4)
    assert value("cdpo", label_smoothing=0.2) == pytest.approx(0.8 * low(0.1 * h) + 0.2 * low(-0.1 * h))
    assert value("cdpo", label_smoothing=None) == pytest.approx(0.9 * low(0.1 * h) + 0.1 * low(-0.1 * h))
    assert value("robust", label_smoothing=0.25, sft_weight=None) == pytest.approx(
        (0.75 * low(0.1 * h) - 0.25 * low(-0.1 * h)) / 0.5
    )
    assert value("ipo", beta=0.25) == pytest.approx((averaged - 2) ** 2)
    assert value("ipo", beta=0.25, per_token=False) == pytest.approx((h - 2) ** 2)
    assert value("simpo", beta=2.0, simpo={"gamma": 0.5}) == pytest.approx(low(2 * (-2 + 4.5) - 0.5))
    assert value("simpo", beta=2.0, simpo={"gamma_beta_ratio": 0.5}) == pytest.approx(low(5.0 - 1.0))
    odds = [p / (1 - p) for p in (math.exp(-2), math.exp(-4.5))]
    assert value("orpo", beta=0.3) == pytest.approx(2 + 0.3 * low(math.log(odds[0] / odds[1])), abs=1e-5)


# -- what it is measured by ---------------------------------------------------------------------------------


def test_fault_76_accuracy_is_a_mean_whatever_the_micro_batches_and_a_tie_is_no_win(policy: Policy) -> None:
    pairs = random_pairs(8)
    for budget in (16, 30, 4096):
        metrics, _ = update(policy, pairs, section(), budget=budget)
        assert 0 <= metrics["accuracy"] <= 1
    tied = own_reference(policy, [Pair(p.chosen, p.chosen) for p in pairs])
    assert update(policy, tied, section())[0]["accuracy"] == 0.0


def test_the_metrics_are_what_their_names_say(policy: Policy) -> None:
    pairs = random_pairs(4)
    metrics, _ = update(policy, pairs, section("dpo", beta=0.2), budget=16)
    current = [[alone(policy, a.sample).detach().double() for a in pair.answers] for pair in pairs]
    known = [[a.reference.double() for a in pair.answers] for pair in pairs]  # type: ignore[union-attr]
    sums = [[float(c.sum()) for c in row] for row in current]
    ratios = [[float(c.sum() - k.sum()) for c, k in zip(*row)] for row in zip(current, known)]
    tokens = sum(len(c) for row in current for c in row)
    d = [c - k for row in zip(current, known) for c, k in zip(*row)]
    want = {
        "logprob_chosen": sum(row[0] for row in sums) / 4,
        "logprob_rejected": sum(row[1] for row in sums) / 4,
        "drift_chosen": sum(row[0] for row in ratios) / 4,
        "drift_rejected": sum(row[1] for row in ratios) / 4,
        "reward_chosen": 0.2 * sum(row[0] for row in ratios) / 4,
        "reward_rejected": 0.2 * sum(row[1] for row in ratios) / 4,
        "margin": 0.2 * sum(row[0] - row[1] for row in ratios) / 4,
        "accuracy": sum(row[0] > row[1] for row in ratios) / 4,
        "kl": sum(float((x.exp() - 1 - x).sum()) for x in d) / tokens,
        "tokens": tokens,
    }
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name


def test_a_loss_without_reference_reports_no_distance_from_one(policy: Policy) -> None:
    metrics, _ = update(policy, random_pairs(2, reference=False), section("simpo"))
    assert not {"kl", "drift_chosen", "drift_rejected"} & metrics.keys()
    assert "logprob_chosen" in metrics


def test_fault_48_padding_does_not_enter_the_kl(policy: Policy) -> None:
    """A short pair beside a long one: its kl is the same as alone."""
    short, long = random_pairs(2, seed=3)
    extended = sample([*long.chosen.sample.token_ids, *range(30, 50)], 4, group="long")
    padded = as_pair(extended, extended)
    both = own_reference(policy, [short, padded])
    alone_, _ = score_pairs(policy, [short])
    together, _ = score_pairs(policy, [short, both[1]])
    torch.testing.assert_close(together.kl[:1], alone_.kl, rtol=1e-4, atol=1e-5)


def test_fault_30_tool_output_counts_for_no_length(policy: Policy) -> None:
    """An answer of three trained tokens with a tool's five between them is divided by 3."""
    ids = [20, 21, 22, *range(40, 48)]
    holed = (False,) * 3 + (True,) + (False,) * 5 + (True,) * 2
    pair = as_pair(sample(ids, 3, group="a", mask=holed), sample([20, 21, 22, 60], 3, group="a"))
    chosen, rejected = score_pairs(policy, [pair])
    assert (int(chosen.length), int(rejected.length)) == (3, 1)
    metrics, _ = update(policy, [pair], section("simpo", beta=1.0))
    assert metrics["reward_chosen"] == pytest.approx(
        float(alone(policy, pair.chosen.sample).detach().mean()), abs=1e-5
    )


# -- how the step is cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@hypothesis_settings(max_examples=5, deadline=None)
@given(count=st.integers(1, 7), seed=st.integers(0, 99), budget=st.integers(1, 60))
def test_fault_26_the_gradient_does_not_depend_on_the_micro_batches(
    loss: str, count: int, seed: int, budget: int
) -> None:
    policy = tiny_policy()
    pairs = random_pairs(count, seed=seed)
    whole, wanted = update(policy, pairs, section(loss))
    parts, got = update(policy, pairs, section(loss), budget=budget)
    assert_close(got, wanted)
    for name in whole.keys() - {"tokens_computed"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-4), name


@hypothesis_settings(max_examples=6, deadline=None)
@given(count=st.integers(2, 5), seed=st.integers(0, 99), budget=st.integers(1, 40))
def test_fault_74_ktos_reference_point_belongs_to_the_step(count: int, seed: int, budget: int) -> None:
    policy = tiny_policy()
    batch = judged(random_pairs(count, seed=seed))
    whole, wanted = kto_step(policy, batch)
    parts, got = kto_step(policy, batch, budget=budget)
    assert_close(got, wanted)
    for name in whole.keys() - {"tokens_computed"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-4), name


def test_a_pair_is_never_parted_and_its_prompt_is_computed_once(policy: Policy) -> None:
    pairs = random_pairs(6)
    for budget in (1, 10, 25):
        rows = cut(pairs, budget)
        assert sorted(i for part in rows for i in part) == list(range(6))
    assert len(cut(pairs, 1)) == 6
    prompt = [*range(20, 40)]
    one = as_pair(sample([*prompt, 50, 51], 20, group="a"), sample([*prompt, 60], 20, group="a"))
    metrics, _ = update(policy, [one], section("simpo"))
    assert metrics["tokens_computed"] == 20 + 1  # last tokens are predicted and predict nothing


@pytest.mark.parametrize("mode", ["packed", "padded", "full"])
def test_the_layout_changes_nothing(mode: str) -> None:
    pairs = random_pairs(4)
    wanted = update(tiny_policy(mode="padded"), pairs, section())
    got = update(tiny_policy(mode=mode), pairs, section())  # type: ignore[arg-type]
    assert_close(got[1], wanted[1])


# -- KTO ----------------------------------------------------------------------------------------------------


def test_kto_is_what_it_says_by_hand(policy: Policy) -> None:
    batch = judged(random_pairs(3))
    metrics, _ = kto_step(policy, batch, beta=0.2, kto={"undesirable_weight": 1.5})

    def ratio(answer: Answer) -> float:
        assert answer.reference is not None
        return float(alone(policy, answer.sample).detach().double().sum() - answer.reference.double().sum())

    z0 = max(0.0, sum(ratio(j.mismatched) for j in batch) / len(batch))
    want = [
        1 - 1 / (1 + math.exp(-0.2 * (ratio(j.answer) - z0)))
        if j.desirable
        else 1.5 * (1 - 1 / (1 + math.exp(-0.2 * (z0 - ratio(j.answer)))))
        for j in batch
    ]
    assert metrics["loss"] == pytest.approx(sum(want) / len(want), abs=1e-5)
    assert metrics["reference_point"] == pytest.approx(0.2 * z0, abs=1e-5)
    up = [ratio(j.answer) for j in batch if j.desirable]
    assert metrics["reward_desirable"] == pytest.approx(0.2 * sum(up) / len(up), rel=1e-4)
    assert metrics["drift_desirable"] == pytest.approx(sum(up) / len(up), rel=1e-4)


def test_kto_reports_only_the_kind_it_has(policy: Policy) -> None:
    batch = [j for j in judged(random_pairs(3)) if j.desirable]
    metrics, _ = kto_step(policy, batch)
    assert "reward_desirable" in metrics
    assert not [name for name in metrics if name.endswith("undesirable")]
    assert "margin" not in metrics


def test_the_mismatched_answer_stands_after_the_prompt_of_the_other() -> None:
    one = sample([1, 2, 3, 40, 41], 3, group="a")
    other = sample([7, 8, 50, 51, 52], 2, group="b", mask=(False, False, True, False, True))
    made = mismatch(one, other)
    assert made.token_ids == (1, 2, 3, 50, 51, 52)
    assert made.mask == (False, False, False, True, False, True)  # the tool's output stays untrained
    assert (made.group_id, len(made.turn_ids), len(made.behaviour_logprobs)) == ("a", 6, 6)
