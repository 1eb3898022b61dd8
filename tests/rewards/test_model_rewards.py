"""Learned rewards: ensembles by hand, None never 0, and a saved model named in a recipe."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from spine import tiny_policy

from stepladder.data.chat.renderer import Renderer
from stepladder.errors import ConfigError
from stepladder.policies.conversation_scorer import ConversationScorer
from stepladder.policies.heads import ScalarHead, ScoredModel
from stepladder.policies.reward_folder import RewardInfo, save_scored
from stepladder.recipe.config import load_recipe
from stepladder.rewards.model import ProcessRewardModel, RewardModel
from stepladder.rewards.reward import as_reward, score_group
from stepladder.types import Failure, Group, Message, Score, Task, Trajectory
from stepladder.workbench.model_rewards import model_reward, names_model
from stepladder.workbench.prepare import make_scorer

Values = Sequence[float | None]


class Fixed:
    """A reward model with given raw scores."""

    def __init__(self, values: Values, mean: float = 0.0, std: float = 1.0) -> None:
        self.values, self.mean, self.std = values, mean, std

    def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        return list(self.values[: len(conversations)])


class FixedSteps:
    def __init__(self, *rows: Sequence[float] | None) -> None:
        self.rows = rows

    def step_logprobs(self, conversations: Any) -> list[tuple[float, ...] | None]:
        return [None if row is None else tuple(math.log(p) for p in row) for row in self.rows]


def trajectory(answer: str = "b", *, failure: Failure | None = None, name: str = "t") -> Trajectory:
    task = Task("task", messages=(Message("user", "a"),))
    messages = (*task.messages, Message("assistant", answer))
    return Trajectory(name, "g", task, (), messages, (), Score(0.0), "terminated", failure)


TALK = [Message("user", "a"), Message("assistant", "b")]


@pytest.mark.parametrize(("combine", "wanted"), [("mean", 2.0), ("min", 0.5), ("mean-std", 2.0 - 1.5)])
def test_an_ensemble_by_hand_after_normalisation(combine: Any, wanted: float) -> None:
    """Raw 7 with mean 0, std 2 is 3.5; raw 3 with mean 2, std 2 is .5: mean 2, std 1.5."""
    members = [Fixed([7.0], 0.0, 2.0), Fixed([3.0], 2.0, 2.0)]
    assert RewardModel(members, combine=combine).scores([TALK]) == [pytest.approx(wanted)]
    raw = RewardModel(members, normalise=False).scores([TALK])
    assert raw == [5.0]


def test_what_one_member_cannot_score_is_none_and_never_zero() -> None:
    model = RewardModel([Fixed([1.0, 2.0]), Fixed([1.0, None])], combine="min")
    assert model.scores([TALK, TALK]) == [1.0, None]
    steps = ProcessRewardModel([FixedSteps([0.5], None)], aggregate=min)
    assert steps.scores([TALK, TALK])[1] is None
    assert steps.step_scores([TALK, TALK])[1] is None


def test_a_model_that_learnt_nothing_cannot_be_normalised() -> None:
    with pytest.raises(ConfigError, match=r"same score .std 0.0.*learnt nothing"):
        RewardModel([Fixed([1.0], std=0.0)])
    assert RewardModel([Fixed([1.0], std=0.0)], normalise=False).scores([TALK]) == [1.0]


def test_steps_are_combined_one_by_one_then_aggregated() -> None:
    """(.9, .4) and (.5, .8): means (.7, .6), the smaller of which is the score."""
    members = [FixedSteps([0.9, 0.4]), FixedSteps([0.5, 0.8])]
    model = ProcessRewardModel(members, aggregate=lambda logs: math.exp(min(logs)))
    (steps,) = model.step_scores([TALK])
    assert steps == pytest.approx((0.7, 0.6))
    (score,) = model([trajectory()])
    assert score.value == pytest.approx(0.6)
    assert score.parts == {"step0": pytest.approx(0.7), "step1": pytest.approx(0.6)}


@pytest.mark.parametrize(
    ("aggregation", "wanted"), [("min", 0.4), ("product", 0.288), ("last", 0.4), ("mean", 0.7)]
)
def test_aggregations_are_those_of_the_spec(tmp_path: Path, aggregation: str, wanted: float) -> None:
    """p = (.9, .8, .4): product .288, min .4, last .4, mean .7."""
    saved(tmp_path / "prm", kind="process")
    made = model_reward(f"process_reward_model:{tmp_path / 'prm'}?aggregation={aggregation}").function
    made.members = (FixedSteps([0.9, 0.8, 0.4]),)
    assert made.scores([TALK]) == [pytest.approx(wanted)]


# -- models on disk ----------------------------------------------------------------------------------------


def saved(path: Path, *, kind: Any = "outcome", seed: int = 0, std: float = 2.0) -> ScoredModel:
    policy = tiny_policy()
    model = ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3, seed=seed))
    save_scored(model, path, RewardInfo(kind, 1.0, std, tuple(Renderer(policy.tokenizer).stop_token_ids)))
    return model


def scorer(path: Path) -> ConversationScorer:
    return ConversationScorer.load(path, dtype="float32", device="cpu")


def test_scores_do_not_depend_on_the_company(tmp_path: Path) -> None:
    saved(tmp_path / "rm")
    model = scorer(tmp_path / "rm")
    talks = [[Message("user", "hello"), Message("assistant", "x" * n)] for n in (1, 4, 9)]
    together = model.scores(talks)
    assert together == [pytest.approx(model.scores([talk])[0], abs=1e-5) for talk in talks]
    assert len({round(s, 3) for s in together if s is not None}) == 3


def test_what_follows_the_last_answer_changes_no_score(tmp_path: Path) -> None:
    saved(tmp_path / "rm")
    talk = [Message("user", "hi"), Message("assistant", "b")]
    one, other = scorer(tmp_path / "rm").scores([talk, [*talk, Message("user", "thanks")]])
    assert one == pytest.approx(other, abs=1e-5)


def test_conversations_that_cannot_be_scored_are_none(tmp_path: Path) -> None:
    saved(tmp_path / "rm")
    user, answer = Message("user", "hi"), Message("assistant", "b")
    long = Message("assistant", "b" * 500)  # the model has 128 positions
    found = scorer(tmp_path / "rm").scores([[user], [answer], [user, long], [user, answer]])
    assert [score is None for score in found] == [True, True, True, False]
    saved(tmp_path / "prm", kind="process")
    steps = scorer(tmp_path / "prm").step_logprobs([[user, Message("assistant", " \n ")], [user, answer]])
    assert steps[0] is None
    assert steps[1] is not None
    assert len(steps[1]) == 1


def test_a_recipe_names_a_saved_model_and_failed_episodes_stay_unscored(tmp_path: Path) -> None:
    saved(tmp_path / "a", seed=0)
    saved(tmp_path / "b", seed=1)
    text = f"reward_model:{tmp_path / 'a'},{tmp_path / 'b'}?combine=min"
    recipe = load_recipe(
        {
            "model": {"name": "tiny", "dtype": "float32", "device": "cpu"},
            "environment": {"name": "reviews", "rewards": [text]},
            "rl": {},
        }
    )
    score = make_scorer(recipe)
    assert score is not None
    failed = trajectory(failure=Failure("engine", "EngineError", "gone"), name="broken")
    group = Group("g", failed.task, (trajectory("good"), failed, trajectory("bad")))
    out = asyncio.run(score(group)).trajectories
    assert out[1].score == failed.score  # not shown to any reward
    members = [scorer(tmp_path / name) for name in "ab"]
    for i in (0, 2):
        raw = [m.scores([out[i].messages])[0] for m in members]
        wanted = min((r - 1.0) / 2.0 for r in raw if r is not None)
        assert out[i].score.value == pytest.approx(wanted, abs=1e-5)
        assert out[i].score.parts["reward_model"] == out[i].score.value
        assert "reward_model/member1" in out[i].score.parts


def test_functions_may_take_whole_trajectories() -> None:
    def lengths(trajectories: list[Trajectory]) -> list[float]:
        return [float(len(t.messages[-1].text)) for t in trajectories]

    group = Group("g", trajectory().task, (trajectory("ab"), trajectory("abcd")))
    out = asyncio.run(score_group(group, [as_reward(lengths)]))
    assert [t.score.value for t in out.trajectories] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward_model:{rm}?combin=min", "unknown option 'combin'.*Did you mean 'combine'"),
        ("reward_model:{rm}?combine=max", "combine must be one of mean, min, mean-std; got 'max'"),
        ("reward_model:{rm}?normalise=no", "true or false; got 'no'"),
        ("reward_model:", "names no folder"),
        ("reward_model:{prm}", "holds a process_reward_model"),
        ("process_reward_model:{rm}", "holds a reward_model"),
        ("process_reward_model:{prm}?aggregation=max", "aggregation must be one of"),
        ("reward_model:nowhere/at/all", "no model folder"),
    ],
)
def test_wrong_names_are_refused(tmp_path: Path, text: str, message: str) -> None:
    saved(tmp_path / "rm")
    saved(tmp_path / "prm", kind="process")
    with pytest.raises(ConfigError, match=message):
        model_reward(text.format(rm=tmp_path / "rm", prm=tmp_path / "prm"))


def test_import_paths_are_no_model_names() -> None:
    assert names_model("reward_model:x")
    assert not names_model("rewards.py:exact")
