"""Whether an episode is solved is said by its environment, whatever is added to the score later."""

from __future__ import annotations

from typing import Any

import pytest
from stage import Base, Stage

from stepladder.engines.scripted import ScriptedEngine
from stepladder.environments.check import check_environment
from stepladder.environments.environment import as_world
from stepladder.environments.mixed import MixedWorld
from stepladder.environments.tools import tool
from stepladder.errors import ConfigError
from stepladder.recipe.config import parse_recipe
from stepladder.recipe.rejection_sampling import Selection
from stepladder.recipe.rl_credit import BonusSection
from stepladder.rewards.reward import score_group
from stepladder.run.records import trajectory_from_dict, trajectory_to_dict
from stepladder.rungs.registry import RUNGS
from stepladder.rungs.rejection_sampling.selection import Seen, select
from stepladder.rungs.rl.shaping import Shaping, shaped
from stepladder.types import Group, Message, Step, Trajectory
from stepladder.workbench.sources import Sources


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


class Sum:
    """A plain class like that of the README: a score of 0 or 1, without a name."""

    inline = True
    tasks = staticmethod(lambda split: [{"prompt": "2 + 3?", "reference": "5"}])

    def reward(self, answer: str) -> float:
        return float(answer == "5")


class Unjudged:
    """Leaves the score to `environment.rewards`."""

    inline = True
    tasks = Sum.tasks

    @tool(inline=True)
    def look(self) -> str:
        """Look."""
        return "5"


class Wordless(Base):
    """The whole protocol, without a score of its own."""

    turns = 1
    judges = False

    async def step(self, message: Message) -> Step:
        return Step(terminated=True)


def play(stage: Stage, world: Any, answers: tuple[str, ...], *rewards: Any) -> Group:
    """One episode for each answer, and what `rewards` think of them added."""
    told = iter(answers)
    engine = ScriptedEngine(lambda request: stage.ids(next(told)))

    async def scorer(group: Group) -> Group:
        return await score_group(group, rewards)

    return stage.play(engine, as_world(world), group_size=len(answers), scorer=scorer)[0]


def likes_wrong_answers(answer: str) -> float:
    """A reward model that is mistaken."""
    return {"5": -0.6, "6": 1.3}[answer]


def exact(answer: str) -> float:
    return float(answer == "5")


def successes(group: Group) -> list[bool]:
    return [t.solved for t in group.trajectories]


def test_a_reward_beside_the_environment_changes_the_score_and_not_success(stage: Stage) -> None:
    group = play(stage, Sum, ("6", "5"), likes_wrong_answers)
    assert [t.score.value for t in group.trajectories] == [1.3, pytest.approx(0.4)]
    assert successes(group) == [False, True]
    assert select(group, Selection(), Seen(), seed=0) == ["unsolved", "accepted"]


def test_bonuses_and_penalties_change_the_score_and_not_success(stage: Stage) -> None:
    """A cost of .1 for the form, and DAPO's penalty in full: 1 - .1 - 1 < 1 and is solved all the same;
    a bonus of 1.5 makes no wrong answer right."""
    group = play(stage, Sum, ("6", "5"))
    fine = BonusSection(kind="format", weight=-0.1, pattern=".")
    cut = shaped([group], Shaping(bonuses=[(fine, -0.1)], overlong=1.0, limit=2, buffer=1))[0]
    assert cut.trajectories[1].score.value == pytest.approx(-0.1)
    assert successes(cut) == [False, True]
    paid = shaped([group], Shaping(bonuses=[(fine, 1.5)]))[0]
    assert paid.trajectories[0].score.value == pytest.approx(1.5)
    assert successes(paid) == [False, True]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("world", [Unjudged, Wordless])
def test_where_the_environment_gives_no_score_the_rewards_say_it(
    stage: Stage, world: type, mixed: bool
) -> None:
    """What they say together: exact alone is 1 for the right answer. Shaping comes after that."""
    played = MixedWorld(worlds=[{"name": world}]) if mixed else world
    group = play(stage, played, ("6", "5"), exact)
    assert successes(group) == [False, True]
    fine = BonusSection(kind="format", weight=-0.1, pattern=".")
    assert successes(shaped([group], Shaping(bonuses=[(fine, -0.1)]))[0]) == [False, True]
    assert successes(play(stage, played, ("6", "5"))) == [False, False]  # nobody says it


def test_what_the_environment_says_of_success_itself_stands(stage: Stage) -> None:
    class Says(Base):
        turns = 1

        async def step(self, message: Message) -> Step:
            return Step(reward=0.3, terminated=True, info={"success": message.text == "5"})

    assert successes(play(stage, Says, ("6", "5"), likes_wrong_answers)) == [False, True]


def test_success_is_kept_in_files_and_older_files_are_judged_by_their_score(stage: Stage) -> None:
    wrong, right = play(stage, Sum, ("6", "5"), likes_wrong_answers).trajectories

    def back(trajectory: Trajectory, **changes: Any) -> bool:
        return trajectory_from_dict({**trajectory_to_dict(trajectory), **changes}).solved

    assert [back(wrong), back(right)] == [False, True]
    assert [back(wrong, success=None), back(right, success=None)] == [True, False]  # 1.3 and .4

    def of_older_files(trajectory: Trajectory, said: bool) -> bool:
        record = {**trajectory_to_dict(trajectory), "info": {"success": said}}
        del record["success"]
        return trajectory_from_dict(record).solved

    assert [of_older_files(wrong, False), of_older_files(right, True)] == [False, True]


def test_an_environment_that_nobody_judges_is_told_before_a_model_is_loaded() -> None:
    """A misspelt `reward` would cost a whole run of zeros."""
    recipe = parse_recipe(
        {"environment": {"name": "own"}, "rl": {"steps": 1}, "evaluation": {"tasks": 1, "raw": 0}}
    )
    world = as_world(Unjudged)
    with pytest.raises(ConfigError, match=r"no method `reward`.*environment\.rewards"):
        RUNGS["rl"].check(recipe, world, Sources())
    RUNGS["rl"].check(
        parse_recipe(
            {**recipe.model_dump(exclude_none=True), "environment": {"name": "own", "rewards": ["x.py:f"]}}
        ),
        world,
        Sources(),
    )
    report = check_environment(Unjudged)
    (said,) = [check for check in report.checks if check.name == "an episode ends"]
    assert said.status == "note"
    assert "no method `reward`" in str(report)
