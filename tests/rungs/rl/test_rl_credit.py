"""Whose advantage is what: the worked numbers of the papers, through the batch that is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from told_episodes import by_token, episode, group
from torch import Tensor

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.errors import ConfigError
from stepladder.rungs.rl.credit import MeasuredColumns, make_batch
from stepladder.rungs.rl.turn_credit import CreditRules
from stepladder.rungs.rl.update import RlBatch, with_signal
from stepladder.types import Group, Trajectory

PLAIN = ALGORITHMS["dr_grpo"]  # group mean, no deviation
GRPO = ALGORITHMS["grpo"]
PPO = dataclasses.replace(ALGORITHMS["ppo"], whiten=False)


def near(rows: list[list[float]], wanted: list[list[float]]) -> None:
    assert len(rows) == len(wanted)
    for row, want in zip(rows, wanted, strict=True):
        assert row == pytest.approx(want, abs=1e-6)


def advantages(
    groups: Sequence[Group], row: Algorithm = PLAIN, measured: MeasuredColumns | None = None, **rules: Any
) -> list[list[float]]:
    measure = None if measured is None else lambda batch: measured
    return by_token(make_batch(groups, row, CreditRules(**rules), measure=measure))


# -- by turns ------------------------------------------------------------------------------------------------


def test_return_to_go_of_the_worked_example() -> None:
    """Four calls at .10, then a submission; baseline .45. Failed: .4-.45, .3-.45, ...; solved: one more."""
    failed, solved = episode([0.1] * 4 + [0.0]), episode([0.1] * 4 + [1.0])
    row = ALGORITHMS["reinforce"]
    got = advantages([group(failed, solved)], row, credit="turns", baseline=0.45)
    near(got, [[-0.05, -0.15, -0.25, -0.35, -0.45], [0.95, 0.85, 0.75, 0.65, 0.55]])
    whole = advantages([group(failed, solved)], row, baseline=0.9)
    near(whole, [[-0.5] * 5, [0.5] * 5])  # outcome: .4 and 1.4 for every token


def test_the_discount_runs_over_turns_whatever_their_length() -> None:
    """gamma .8: returns 1.0, .9 = .1 + .8·1, .82 = .1 + .8·.9, ...; lengths of turns change none of them."""
    solved = episode([0.1] * 4 + [1.0], tokens=[3, 1, 2, 1, 1], gap=9)
    got = advantages([group(solved)], ALGORITHMS["reinforce"], credit="turns", turn_gamma=0.8)
    near(got, [[0.7048] * 3 + [0.756] + [0.82] * 2 + [0.9, 1.0]])


def test_a_turn_is_compared_with_the_same_turn_of_its_siblings() -> None:
    """Rewards 1, 0 and 0, 1. Returns-to-go: 1, 0 and 1, 1. The first turns are equal, the second differ."""
    pair = group(episode([1.0, 0.0]), episode([0.0, 1.0]))
    near(advantages([pair], credit="turns"), [[0.0, -0.5], [0.0, 0.5]])
    # outcome: both earned 1, so nothing is learned
    near(advantages([pair]), [[0.0, 0.0], [0.0, 0.0]])


def test_a_turn_that_no_sibling_reached_is_compared_with_the_episodes() -> None:
    """Returns: 2, 2, 2 of the long one, 0 of the short one. Turns 2 and 3 against the episodes' mean, 1."""
    pair = group(episode([0.0, 0.0, 2.0]), episode([0.0]))
    near(advantages([pair], credit="turns"), [[1.0, 1.0, 1.0], [-1.0]])


def test_a_split_trajectory_gets_the_same_credit() -> None:
    whole = group(episode([1.0, 0.0, 2.0], tokens=[1, 2, 1]), episode([0.0, 1.0, 0.0]))
    split = group(episode([1.0, 0.0, 2.0], tokens=[1, 2, 1], split_after=0), episode([0.0, 1.0, 0.0]))
    for rules in ({"credit": "turns"}, {"credit": "gigpo"}, {"credit": "process"}, {}):
        one, two = advantages([whole], **rules), advantages([split], **rules)
        near([two[0] + two[1], two[2]], one)


def test_process_rewards_by_hand() -> None:
    """All five steps together: mean .5, deviation .353553; normalised 0, 1.41 and -1.41, 0, 0; summed to the
    end of each."""
    pair = group(episode([0.5, 1.0]), episode([0.0, 0.5, 0.5]))
    got = advantages([pair], GRPO, credit="process")
    assert got[0] == pytest.approx([1.414214, 1.414214], abs=1e-4)
    assert got[1] == pytest.approx([-1.414214, 0.0, 0.0], abs=1e-4)


def test_gigpo_by_hand() -> None:
    """T1: s0, s1, worth 1; T2: s0, s2, s1, worth 0; gamma .95. Episodes ±.5; steps at s0 .95 and 0, at s1 1
    and 0; s2 was seen once. The anchors are the observations, wherever they stand."""
    first = episode([0.0, 1.0], saw=["s0", "s1"])
    second = episode([0.0, 0.0, 0.0], saw=["s0", "s2", "s1"])
    got = advantages([group(first, second)], credit="gigpo", turn_gamma=0.95)
    near(got, [[0.975, 1.0], [-0.975, -0.5, -1.0]])


def test_what_a_scorer_adds_falls_to_the_last_turn() -> None:
    """The environment gave .2 and 0, the score is 1.2: the last turn earned the other 1."""
    got = advantages([group(episode([0.2, 0.0], score=1.2))], ALGORITHMS["reinforce"], credit="turns")
    near(got, [[1.2, 1.0]])


# -- KL, whitening, critics ----------------------------------------------------------------------------------


def test_kl_in_the_reward_of_whole_episodes() -> None:
    """RLOO: scores 1 and 0, KL .5 and .1 nats, beta .1: .95 against -.01, and the reverse."""
    pair = group(episode([1.0], tokens=[2]), episode([0.0], tokens=[2]))
    kl = torch.tensor([[0.0, 0.0, 0.2, 0.3], [0.0, 0.0, 0.1, 0.0]])
    batch = make_batch(
        [pair],
        ALGORITHMS["rloo"],
        CreditRules(kl_coefficient=0.1),
        measure=lambda _: MeasuredColumns(kl=kl),
    )
    near(by_token(batch), [[0.96, 0.96], [-0.96, -0.96]])
    assert batch.measured["kl_reward"] == pytest.approx(0.3)


def test_kl_in_the_reward_of_tokens_is_whitened_with_them() -> None:
    """REINFORCE++: r = -.02, -.01, .97 gives returns .94, .96, .97; and 0, 0, 0 for the other. Their mean
    .478333; the deviation with ddof 1 of the six is .524077."""
    pair = group(episode([1.0], tokens=[3]), episode([0.0], tokens=[3]))
    kl = torch.zeros(2, 5)
    kl[0, 2:] = torch.tensor([0.2, 0.1, 0.3])
    got = advantages([pair], ALGORITHMS["reinforce++"], MeasuredColumns(kl=kl), kl_coefficient=0.1)
    returns = torch.tensor([0.94, 0.96, 0.97, 0.0, 0.0, 0.0], dtype=torch.float64)
    wanted = ((returns - returns.mean()) / returns.std()).tolist()
    near(got, [wanted[:3], wanted[3:]])


@pytest.mark.parametrize("split", [None, 1])
def test_gae_by_hand(split: int | None) -> None:
    """r 0, 0, 0, 1; V .5, .6, .7, .8; lambda .95: .2, .29, .3755, .456725 from the end. What stands between
    the turns changes nothing, nor does a history that was rewritten after the second turn."""
    one = episode([0.0, 0.0, 0.0, 1.0], split_after=split, gap=3)
    values = torch.tensor([0.5, 0.6, 0.7, 0.8])

    def measure(batch: RlBatch) -> MeasuredColumns:
        out = torch.full((len(batch.samples), max(len(s.token_ids) for s in batch.samples)), 99.0)
        k = 0
        for i, sample in enumerate(batch.samples):
            for t, trained in enumerate(sample.mask):
                if trained:
                    out[i, t], k = values[k], k + 1
        return MeasuredColumns(values=out, final_values=torch.tensor([5.0]))

    batch = make_batch([group(one)], PPO, CreditRules(lam=0.95), measure=measure)
    flat = [a for row in by_token(batch) for a in row]
    assert flat == pytest.approx([0.456725, 0.3755, 0.29, 0.2], abs=1e-6)
    assert batch.returns is not None
    returns = sorted(float(r) for r in batch.returns.flatten() if r != 0)
    assert returns == pytest.approx(sorted([0.956725, 0.9755, 0.99, 1.0]), abs=1e-6)


@pytest.mark.parametrize(
    ("stop", "bootstrap", "worth"),
    [
        ("terminated", "always", 0.0),
        ("truncated", "limits", 4.0),
        ("max_turns", "limits", 4.0),
        ("length", "limits", 0.0),
        ("length", "always", 4.0),
        ("max_turns", "never", 0.0),
    ],
)
def test_a_cut_episode_goes_on_in_the_critic(stop: Any, bootstrap: Any, worth: float) -> None:
    """One token, reward 1, V 0, and 4 in the state it ended in: an advantage of 1 or 5."""
    measured = MeasuredColumns(values=torch.zeros(1, 3), final_values=torch.tensor([4.0]))
    got = advantages([group(episode([1.0], stop=stop))], PPO, measured, bootstrap=bootstrap)
    near(got, [[1.0 + worth]])


def test_a_critic_over_turns_and_then_over_tokens() -> None:
    """RAGEN: r 1 at tokens 5 and 10, V .1 to 1.0, discount .95 over turns and 1 inside them. The second turn
    is worth 1, the first 1 + .95: 1.95 - .1 = 1.85, 1.95 - .2 = 1.75, ..., 1 - .6 = .4, ..., 0."""
    values = torch.zeros(1, 12)
    values[0, [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]] = torch.arange(1, 11) / 10
    one = episode([1.0, 1.0], tokens=[5, 5], gap=1)
    got = advantages(
        [group(one)], PPO, MeasuredColumns(values=values), credit="bilevel", lam=1.0, turn_gamma=0.95
    )
    near(got, [[1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0.0]])


def test_whitening_comes_last() -> None:
    """Advantages 1 and 0 of one token each: mean .5, deviation .7071, so ±.7071."""
    pair = group(episode([1.0]), episode([0.0]))
    row = dataclasses.replace(ALGORITHMS["reinforce"], whiten=True)
    got = advantages([pair], row)
    near(got, [[0.7071068], [-0.7071068]])


# -- domains -------------------------------------------------------------------------------------------------


def mixed(first: Sequence[float], second: Sequence[float], tokens: Sequence[int] = ()) -> list[Group]:
    lengths = iter(tokens or [1] * (len(first) + len(second)))
    return [
        group(*(episode([r], tokens=[next(lengths)], domain=d) for r in rewards), name=d)
        for d, rewards in (("a/x", first), ("b/y", second))
    ]


def test_domains_of_different_scales_weigh_the_same() -> None:
    got = advantages(mixed([10, 6, 8], [0.9, 0.1, 0.5]), normalise="domain")
    near(got, [[1.224745], [-1.224745], [0.0]] * 2)
    plain = advantages(mixed([10, 6, 8], [0.9, 0.1, 0.5]))
    near(plain, [[2.0], [-2.0], [0.0], [0.4], [-0.4], [0.0]])


def test_tasks_normalised_over_their_tokens() -> None:
    """AgentRL: A 1, -1, .5, -.5 with 2, 4, 1, 3 tokens, all of one task: mean -.3, deviation .781025."""

    def own(rewards: Tensor, groups: Tensor, trajectories: Sequence[Trajectory]) -> Tensor:
        return torch.tensor([1.0, -1.0, 0.5, -0.5])

    four = group(*(episode([0.0], tokens=[n]) for n in (2, 4, 1, 3)))
    wanted = [1.664479, -0.896258, 1.024295, -0.256074]
    got = advantages([four], own=own, normalise="task")
    near(got, [[w] * n for w, n in zip(wanted, (2, 4, 1, 3), strict=True)])
    # the same where each token has an advantage of its own
    per_turn = advantages([four], own=lambda *a: [[1.0], [-1.0], [0.5], [-0.5]], normalise="task")
    near(per_turn, got)


def test_environments_by_group_mean_and_their_own_deviation() -> None:
    """ERPO: both prompts are of one world, all its rewards have deviation .5."""
    prompts = ([1, 0, 0, 0], [1, 1, 1, 0])
    groups = [group(*(episode([r], domain="w/1") for r in rewards)) for rewards in prompts]
    got = advantages(groups, normalise="environment")
    near(got, [[1.5], [-0.5], [-0.5], [-0.5], [0.5], [0.5], [0.5], [-1.5]])


def test_a_domain_with_one_episode_left_has_nothing_to_compare_it_with() -> None:
    got = advantages(mixed([10, 6, 8], [0.9]), normalise="domain")
    near(got, [[1.224745], [-1.224745], [0.0], [0.0]])
    alone = advantages([group(episode([1.0], domain=d)) for d in "ab"], normalise="domain")
    near(alone, [[0.0], [0.0]])
    # groups of one, compared over their domain: mean 2, deviation 1
    ones = [group(episode([r])) for r in (1.0, 3.0)]
    near(advantages(ones, ALGORITHMS["reinforce"], normalise="domain"), [[-1.0], [1.0]])


def test_the_mean_of_a_prompt_needs_two_of_its_episodes() -> None:
    """The second prompt has one left; the others' deviation is .5."""
    groups = [group(episode([1.0]), episode([0.0])), group(episode([1.0]))]
    got = advantages(groups, ALGORITHMS["reinforce"], normalise="environment")
    near(got, [[1.0], [-1.0]])
    assert advantages(groups[1:], ALGORITHMS["reinforce"], normalise="environment") == []


# -- own functions and edges ---------------------------------------------------------------------------------


def test_an_advantage_of_ones_own() -> None:
    seen: list[Any] = []

    def own(rewards: Tensor, groups: Tensor, trajectories: Sequence[Trajectory]) -> Tensor:
        seen.append((rewards.tolist(), groups.tolist(), len(trajectories)))
        return rewards * 10

    near(advantages([group(episode([1.0, 0.5]), episode([0.0]))], own=own), [[15.0, 15.0], [0.0]])
    assert seen == [([1.5, 0.0], [0, 0], 2)]
    near(advantages([group(episode([1.0, 0.5]))], own=lambda *a: [[3.0, 4.0]]), [[3.0, 4.0]])


@pytest.mark.parametrize("answer", [torch.zeros(3), [[1.0]], [[1.0, 2.0, 3.0]], [1.0, 2.0]])
def test_an_own_advantage_of_another_shape_is_refused(answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"one number for each turn \(here \[2\]"):
        advantages([group(episode([1.0, 0.5]))], own=lambda *a: answer)


def test_an_own_advantage_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="NaN or infinity"):
        advantages([group(episode([1.0]))], own=lambda *a: torch.tensor([float("nan")]))


@pytest.mark.parametrize("name", ["reinforce", "ppo", "reinforce++"])
def test_algorithms_without_a_group_baseline_keep_groups_of_one(name: str) -> None:
    assert len(make_batch([group(episode([1.0]))], ALGORITHMS[name]).samples) == 1
    assert make_batch([group(episode([1.0]))], ALGORITHMS["grpo"]).samples == []


def test_a_trajectory_with_a_signal_on_one_of_its_rows_is_whole() -> None:
    """GSPO's ratio runs over both rows, so the row without a signal must not be skipped."""
    one = episode([1.0, 0.0], split_after=0, name="t")
    batch = make_batch([group(one, episode([0.0, 0.0], name="u"))], PLAIN, CreditRules(credit="turns"))
    assert by_token(batch) == [[0.5], [0.0], [-0.5, 0.0]]
    assert with_signal(batch) == [0, 1, 2]
    batch.advantages[0] = 0.0
    assert with_signal(batch) == [2]
