"""Reward functions of three styles, and how their values are combined."""

import asyncio
import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.errors import ConfigError, RewardError
from stepladder.rewards.reward import Reward, as_reward, score_group
from stepladder.types import Failure, Group, Message, Sampling, Score, Task, Trajectory, Turn

TASK = Task("train/0", messages=(Message("user", "2+3?"),), reference="5", data={"level": 2})


def episode(i, answer, score=0.0, failure=None):
    turn = Turn((1, 2), (10 + i,), (-0.5,), Sampling(), ((0, 1),), "stop")
    return Trajectory(
        id=f"t{i}",
        group_id="g",
        task=TASK,
        turns=(turn,),
        messages=(*TASK.messages, Message("assistant", answer)),
        rewards=(score,),
        score=Score(score, {"correct": score}),
        stop_reason="failed" if failure else "terminated",
        failure=failure,
    )


def group(*answers, scores=None):
    scores = scores or [0.0] * len(answers)
    return Group(
        "g", TASK, tuple(episode(i, a, s) for i, (a, s) in enumerate(zip(answers, scores, strict=True)))
    )


def scored(g, rewards, weights=None, **options):
    return asyncio.run(score_group(g, rewards, weights, **options)).trajectories


def values(trajectories):
    return [trajectory.score.value for trajectory in trajectories]


def exact(answer, task):
    return float(answer == task.reference)


def length(trajectory):
    return -0.1 * len(trajectory.messages[-1].text)


def ranked(completions, prompts, reference, level, **columns):
    texts = [completion[0]["content"] for completion in completions]
    order = sorted(texts, key=len)
    assert prompts == [[{"role": "user", "content": "2+3?"}]] * len(texts)
    assert level == [2] * len(texts)
    return [float(order.index(text)) for text in texts]


def test_three_styles_and_their_weighted_sum():
    out = scored(group("5", "55", "555", scores=[1.0, 0.0, None]), [exact, length, ranked], [2.0, 1.0, 10.0])
    # environment + 2 * exact + length + 10 * rank: 1 + 2 - .1 + 0; 0 + 0 - .2 + 10; unscored stays so
    assert values(out) == pytest.approx([2.9, 9.8, None])
    assert out[0].score.parts == {"correct": 1.0, "exact": 1.0, "length": -0.1, "ranked": 0.0}
    assert out[2].score.parts == {"correct": None, "exact": 0.0, "length": pytest.approx(-0.3), "ranked": 2.0}


def test_the_environment_can_be_weighed_or_left_out():
    g = group("5", "6", scores=[1.0, None])
    assert values(scored(g, [exact], environment_weight=3.0)) == [4.0, None]
    assert values(scored(g, [exact], environment_weight=0.0)) == [1.0, 0.0]
    assert values(scored(g, [], environment_weight=0.0)) == [None, None]
    assert values(scored(g, [])) == [1.0, None]


def test_none_is_unscored_and_never_zero():
    def sometimes(answer):
        return None if answer == "6" else 1.0

    def never(answer):
        return None

    out = scored(group("5", "6", scores=[1.0, 1.0]), [sometimes])
    assert values(out) == [2.0, None]
    assert out[1].score.parts["sometimes"] is None
    # a function that scores nothing of the group does not apply to it
    out = scored(group("5", "6", scores=[1.0, 0.0]), [never])
    assert values(out) == [1.0, 0.0]
    assert out[0].score.parts["never"] is None
    assert values(scored(group("5"), [never], environment_weight=0.0)) == [None]


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_fault_41_a_wrong_number_of_rewards_names_the_function(count):
    def miscounted(completions):
        return [1.0] * count

    g = group(*"abcdef")
    with pytest.raises(RewardError, match=f"reward miscounted returned {count} rewards for 6 completions"):
        scored(g, [miscounted])


def test_fault_90_the_whole_group_is_seen_at_once_with_its_columns():
    seen = []

    def echo(prompts, completions, completion_ids, id, **columns):
        seen.append(len(completions))
        assert set(columns) == {"reference", "domain", "level", "trajectories"}
        assert completion_ids == [[10], [11], [12], [13]]
        return [float(c[0]["content"]) for c in completions]

    assert values(scored(group("3", "1", "2", "0"), [echo])) == [3.0, 1.0, 2.0, 0.0]
    assert seen == [4]


@settings(deadline=None)
@given(st.permutations(range(5)))
def test_each_reward_stays_with_its_own_episode(order):
    def own(completions):
        return [float(c[-1]["content"]) for c in completions]

    assert values(scored(group(*map(str, order)), [own])) == [float(i) for i in order]


def test_episodes_that_failed_are_not_shown():
    def count(completions):
        return [float(len(completions))] * len(completions)

    g = group("5", "5", "5")
    broken = episode(1, "5", None, Failure("tool", "ToolError", "gone"))
    g = replace(g, trajectories=(g.trajectories[0], broken, g.trajectories[2]))
    out = scored(g, [count, exact])
    assert values(out) == [3.0, None, 3.0]
    assert out[1] == broken
    assert scored(replace(g, trajectories=(broken,)), [count, exact]) == (broken,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "reward bad returned 'yes'; return a number, a Score, or None"),
        (float("nan"), "reward bad returned nan"),
        (float("-inf"), "reward bad returned -inf"),
        (Score(1.0, {"style": float("nan")}), "reward bad, part 'style', returned nan"),
    ],
)
def test_what_is_no_number_is_refused(value, message):
    def bad(answer):
        return value

    def bad_group(completions):
        return [0.0, value]

    with pytest.raises(RewardError) as caught:
        scored(group("5"), [bad])
    assert message in str(caught.value)
    with pytest.raises(RewardError, match="reward bad_group, completion 1"):
        scored(group("5", "6"), [bad_group])


@pytest.mark.parametrize("value", ["ab", {0: 1.0, 1: 2.0}, None, 1.0])
def test_a_group_reward_returns_a_list(value):
    def bad(completions):
        return value

    with pytest.raises(RewardError, match="return a list with one reward for each of the 2 completions"):
        scored(group("5", "6"), [bad])


def test_a_failing_call_is_recorded_and_the_group_goes_on():
    def picky(answer):
        if answer == "6":
            raise ValueError("cannot read 6")
        return 1.0

    out = scored(group("5", "6"), [picky])
    assert values(out) == [1.0, None]
    assert out[0].failure is None
    assert out[1].failure == Failure("reward", "ValueError", "reward picky raised ValueError: cannot read 6")

    def down(completions):
        raise ConnectionError("no judge")

    out = scored(group("5", "6"), [down, exact])
    assert values(out) == [None, None]
    assert [trajectory.failure.kind for trajectory in out] == ["ConnectionError"] * 2
    assert out[0].score.parts == {"correct": 0.0, "down": None, "exact": 1.0}


def test_a_programming_error_is_loud():
    def wrong(answer):
        return answer.no_such_method()

    with pytest.raises(AttributeError) as caught:
        scored(group("5"), [wrong])
    assert caught.value.__notes__ == ["raised in reward wrong"]


def test_fault_82_and_96_a_hung_reward_is_ended_and_not_zero():
    def slow(answer):
        time.sleep(0.5)
        return 1.0

    out = scored(group("5", "6"), [Reward("slow", slow, "answer", deadline=0.05)])
    assert values(out) == [None, None]
    assert "reward slow gave no result within 0.05 s" in out[0].failure.message


def test_async_rewards_of_a_group_run_together():
    running, most = 0, 0

    async def judge(answer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    assert values(scored(group(*"abcd"), [judge])) == [1.0] * 4
    assert most == 4


def test_scores_with_parts_and_explanations_are_kept():
    def judged(trajectory):
        return Score(0.5, {"style": 0.2}, "dull")

    (out,) = scored(group("5", scores=[1.0]), [judged])
    assert out.score == Score(1.5, {"correct": 1.0, "judged": 0.5, "judged/style": 0.2}, "judged: dull")


def test_tool_turns_are_part_of_a_completion():
    seen = {}

    def look(completions, prompts):
        seen["completion"], seen["prompt"] = completions[0], prompts[0]
        return [0.0]

    shot = Message("assistant", "an example")
    task = replace(TASK, messages=(Message("user", "first"), shot, Message("user", "2+3?")))
    messages = (
        *task.messages,
        Message("assistant", "call"),
        Message("tool", "5"),
        Message("assistant", "It is 5"),
    )
    one = replace(episode(0, ""), task=task, messages=messages)
    scored(Group("g", task, (one,)), [look])
    assert [m["role"] for m in seen["prompt"]] == ["user", "assistant", "user"]
    assert [m["content"] for m in seen["completion"]] == ["call", "5", "It is 5"]
    assert values(scored(Group("g", task, (one,)), [lambda answer: float(answer == "It is 5")])) == [1.0]


def no_parameters(): ...
def misspelt(anser, task): ...
def too_much(answer, reference): ...
def wants_column(completions, levle): ...


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (no_parameters, "first parameter must be called 'answer'"),
        (misspelt, "Did you mean 'answer'"),
        (too_much, "takes 'reference'; an answer reward takes (answer) or (answer, task)"),
        (3, "3 is no reward function"),
        ("nothing", "no import path"),
        ("stepladder.types:NoSuch", "has no 'NoSuch'"),
    ],
)
def test_what_is_no_reward_function_is_refused(target, message):
    with pytest.raises(ConfigError) as caught:
        as_reward(target)
    assert message in str(caught.value)


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="1 weights for 2 rewards"):
        scored(group("5"), [exact, length], [1.0])
    with pytest.raises(ConfigError, match="two rewards are called 'exact'"):
        scored(group("5"), [exact, exact])
    with pytest.raises(ConfigError, match="the environment has a reward part called 'correct'"):
        scored(group("5"), [as_reward(exact, name="correct")])
    with pytest.raises(
        ConfigError, match=re.escape("column 'levle', which the tasks do not have. Did you mean 'level'?")
    ):
        scored(group("5"), [wants_column])


def test_rewards_load_by_path_and_may_be_objects(tmp_path):
    class Bonus:
        def __call__(self, answer):
            return 2.0

    file = tmp_path / "mine.py"
    file.write_text("def best(answer, task):\n    return 3.0 if answer == task.reference else 0.0\n")
    loaded = as_reward(f"{file}:best")
    assert (loaded.name, loaded.style) == ("best", "answer")
    assert values(scored(group("5"), [loaded, Bonus()], [1.0, 0.5])) == [4.0]


# -- process rewards ---------------------------------------------------------------------------------------


def two_turns(rewards):
    one = episode(0, "x", 0.0)
    one = replace(one, turns=one.turns * 2, rewards=rewards, score=Score(sum(rewards)))
    return Group("g", TASK, (one,))


def steps(trajectory):
    return [0.5, 0.25]


def test_a_process_reward_gives_each_turn_its_number():
    """Environment 0 and 1, steps .5 and .25 with weight 2: turns 1 and 1.5, a score of 2.5."""
    (out,) = scored(two_turns((0.0, 1.0)), [steps], [2.0])
    assert out.rewards == (1.0, 1.5)
    assert out.score.value == 2.5
    assert out.score.parts["steps"] == 0.75


def test_without_the_environment_only_the_steps_are_left():
    (out,) = scored(two_turns((0.0, 1.0)), [steps], environment_weight=0.0)
    assert out.rewards == (0.5, 0.25)
    assert out.score.value == 0.75


def test_a_plain_reward_leaves_the_turns_alone():
    (out,) = scored(two_turns((0.25, 0.5)), [lambda trajectory: 1.0])
    assert out.rewards == (0.25, 0.5)
    assert out.score.value == 1.75


def test_a_process_reward_of_another_length_is_refused():
    def wrong(trajectory):
        return [1.0]

    with pytest.raises(RewardError, match=r"wrong returned 1 numbers for an episode of 2 turns"):
        scored(two_turns((0.0, 0.0)), [wrong])


def test_a_turn_that_cannot_be_judged_leaves_the_episode_unscored():
    (out,) = scored(two_turns((0.0, 1.0)), [lambda trajectory: [0.5, None]])
    assert out.score.value is None or out.score.value == 1.0  # alone in its group: the reward does not apply
    assert out.rewards == (0.0, 1.0)
