"""`Algorithm.sequence` = "turn": ratios, lengths and denominators of each turn by itself, by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from spine import DIGIT_SYMBOLS, digit_recipe, gradients, lines, tiny_policy

from stepladder import ladder
from stepladder.algorithms import ALGORITHMS
from stepladder.errors import ConfigError
from stepladder.objectives.reduce import step_denominators
from stepladder.policies.policy import Policy
from stepladder.run.progress import Display
from stepladder.rungs.rl.turn_sequences import by_turns
from stepladder.rungs.rl.update import RlBatch, UpdateRules, micro_batch_loss
from stepladder.types import TrainingSample

# One trajectory: a prompt of two tokens, a turn of two, an observation of one, a turn of one.
IDS, TURNS = (9, 10, 11, 12, 13, 14), (-1, -1, 0, 0, -1, 1)
MASK = tuple(turn >= 0 for turn in TURNS)
LOG_RATIOS = {2: 0.2, 3: 0.4, 5: -0.1}  # current - proximal, in nats
GSPO = dataclasses.replace(ALGORITHMS["gspo"], clip_low=None, clip_high=None, kl_in="none")


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(symbols=DIGIT_SYMBOLS)


def batch_of(policy: Policy) -> RlBatch:
    sample = TrainingSample(IDS, MASK, (0.0,) * 6, "t", TURNS, "g")
    return RlBatch(
        [sample], torch.ones(1), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    )


def loss_of(policy: Policy, batch: RlBatch, aggregation: str = "sequence_mean") -> float:
    """The surrogate's loss where the proximal log-probabilities lie LOG_RATIOS below the current ones."""
    row = dataclasses.replace(GSPO, aggregation=aggregation)  # type: ignore[arg-type]
    current = policy.logprobs(batch.samples).logprobs.detach()
    for i in range(len(batch.samples)):
        batch.proximal[i] = current[i].clone()
        for t, moved in LOG_RATIOS.items():
            batch.proximal[i][t] -= moved
    lengths = torch.tensor([s.num_trained for s in batch.samples])
    denominators = step_denominators(
        lengths,
        mode=row.aggregation,
        trajectory_index=batch.trajectory_index,
        group_index=batch.group_index,
        constant=10.0,
    )
    rows = list(range(len(batch.samples)))
    loss, _, _ = micro_batch_loss(policy, batch, rows, denominators, UpdateRules(row=row), None)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def test_the_ratio_of_a_turn_is_that_of_its_own_tokens(policy: Policy) -> None:
    """A = 1, no clip. The trajectory is one sequence of three tokens: s = exp((.2 + .4 - .1)/3), and each
    token weighs 1/3: -s. As turns there are two sequences, s1 = exp((.2 + .4)/2) of two tokens with
    D = 2 * 2, and s2 = exp(-.1) of one with D = 2 * 1: -(2 s1/4 + s2/2)."""
    whole = loss_of(policy, batch_of(policy))
    gradients(policy)
    turns = loss_of(policy, by_turns(batch_of(policy)))
    assert whole == pytest.approx(-math.exp(0.5 / 3), abs=1e-5)
    assert turns == pytest.approx(-(math.exp(0.3) + math.exp(-0.1)) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "whole", "turns"),
    [
        # s of the trajectory on three tokens, over S = 1; s1 on two and s2 on one, over S = 2.
        ("sequence_sum", -3 * math.exp(0.5 / 3), -(2 * math.exp(0.3) + math.exp(-0.1)) / 2),
        # the same over S * 10
        ("constant", -3 * math.exp(0.5 / 3) / 10, -(2 * math.exp(0.3) + math.exp(-0.1)) / 20),
        # N = 3 tokens either way: only the ratios differ
        ("token_mean", -math.exp(0.5 / 3), -(2 * math.exp(0.3) + math.exp(-0.1)) / 3),
    ],
)
def test_denominators_count_turns(policy: Policy, aggregation: str, whole: float, turns: float) -> None:
    assert loss_of(policy, batch_of(policy), aggregation) == pytest.approx(whole, abs=1e-5)
    gradients(policy)
    assert loss_of(policy, by_turns(batch_of(policy)), aggregation) == pytest.approx(turns, abs=1e-5)


def test_rows_of_turns_part_the_mask_and_keep_their_columns(policy: Policy) -> None:
    batch = batch_of(policy)
    batch.advantages = torch.arange(6.0)[None]
    batch.values = batch.returns = torch.ones(1, 6)
    rows = by_turns(batch)
    assert [s.mask for s in rows.samples] == [
        (False, False, True, True, False, False),
        (False, False, False, False, False, True),
    ]
    assert {s.trajectory_id for s in rows.samples} == {"t"}  # they stay in one micro-batch
    assert rows.advantages.tolist() == [list(range(6))] * 2
    assert rows.trajectory_index.tolist() == [0, 1]
    assert rows.values is not None
    assert rows.values.shape == (2, 6)


def test_in_episodes_of_one_turn_the_two_are_the_same(tmp_path: Path) -> None:
    """Whole runs, update after update: metrics are equal but for what depends on the order of sums."""
    found = []
    for name, sequence in (("whole", "trajectory"), ("turns", "turn")):
        made = ("rl.algorithm=gspo", "rl.steps=4", "rollout.max_turns=1", "evaluation.raw=0")
        recipe = digit_recipe(tmp_path, name, *made, f"rl.sequence={sequence}")
        run = ladder.train(recipe, display=Display(quiet=True))
        found.append([m for m in lines(run / "metrics.jsonl") if m["phase"] == "rl"])
    whole, turns = found
    assert any(m["updated"] for m in whole)
    for one, other in zip(whole, turns, strict=True):
        for same in ("reward", "trained_tokens", "updated"):
            assert one[same] == other[same]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_where_it_would_change_nothing_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequence='turn' changes nothing.*algorithm = 'gspo'"):
        digit_recipe(tmp_path, "run", "rl.algorithm=dapo", "rl.sequence=turn")
