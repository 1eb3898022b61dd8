"""The calculator world: exact arithmetic, disjoint splits, deterministic problems, honest rewards."""

import asyncio
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.environments.worlds.arithmetic import evaluate, last_number, shown
from stepladder.environments.worlds.calculator import CalculatorWorld, is_correct, split_of
from stepladder.environments.worlds.families import FAMILIES, MORE_FAMILIES, Family
from stepladder.errors import ConfigError, DataError, ToolError
from stepladder.types import Message, ToolCall

SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", 42),
        ("2*(3+4)-1", 13),
        ("0.1+0.2", Fraction(3, 10)),  # exact, not 0.30000000000000004
        ("1/3*3", 1),
        ("7//2", 3),
        ("7%4", 3),
        ("2^10", 1024),
        ("2**-1", Fraction(1, 2)),
        ("-3+5", 2),
        ("1,234+1", 1235),
        ("3 × 4 ÷ 2", 6),
        ("(-1)**99999999999", -1),
        ("0**0", 1),
        ("0**999999999", 0),
        ("1**-5", 1),
    ],
)
def test_values_are_exact(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("9" * 199, "too large"),
        ("1" * 201, "201 characters"),
        ("2**0.5", "whole number"),
        ("", "empty"),
        ("3+", "no complete expression"),
        ("(" * 150 + "1" + ")" * 40, "no complete expression"),
        ("007", "no complete expression"),
        ("5(3)", "cannot compute"),
        ("1,2", "cannot read ','"),
        ("abs(3)", "cannot read 'a'"),
        ("__import__('os').system('touch pwned')", "cannot read"),
        ("1 if 2 else 3", "cannot read"),
        ("1==1", "cannot read"),
    ],
)
def test_fault_127_text_is_never_evaluated_and_refusals_say_why(expression, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolError, match=re.escape(message)):
        evaluate(expression)
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None)
@given(st.text(alphabet="0123456789.+-*/%()^, ", max_size=60))
def test_any_expression_is_a_number_or_a_refusal(text):
    try:
        value = evaluate(text)
    except ToolError:
        return
    assert isinstance(value, Fraction)
    shown(value)


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_agrees_with_python(a, b, c):
    assert evaluate(f"({a})+({b})*{c}") == a + b * c
    assert evaluate(f"({a})/{c}") == Fraction(a, c)


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 999_999))
def test_what_is_shown_is_read_back(whole, decimals):
    value = Fraction(whole * 10**6 + decimals, 10**6)
    assert last_number(f"Answer: {shown(value)}.") == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Answer: 30", 30),
        ("12 boxes, so Answer: 1,360.", 1360),
        ("-5", -5),
        ("from 10-30", 30),  # a range, not minus thirty
        ("x2 is 7.50", Fraction(15, 2)),
        ("$42.", 42),
        ("1, 2, 3", 3),
        ("12,34", 34),
        ("no idea", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_yes_and_no_are_words():
    assert is_correct("Answer: Yes.", "yes")
    assert is_correct("yes? no.", "no")
    assert not is_correct("I know", "no")
    assert not is_correct("", "yes")


@settings(deadline=None)
@given(st.integers(0, 5000), st.sampled_from(SPLITS), st.sampled_from(SPLITS), st.integers(0, 3))
def test_no_numbers_occur_in_two_splits(i, one, other, seed):
    world = CalculatorWorld(seed=seed, train=10_000, validation=10_000, test=10_000)
    question = world.get(one, i).messages[-1].text
    assert split_of(question) == one
    if one != other:
        assert split_of(world.get(other, i).messages[-1].text) != one


def test_no_question_is_shared_between_splits_in_a_large_sample():
    # Narrow numbers, so that questions do repeat: each split repeats its own and never another's.
    def generate(rng: random.Random) -> tuple[str, str | None, str]:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        return f"{a} + {b}?", f"{a}+{b}", str(a + b)

    world = CalculatorWorld(families=[Family("narrow", generate, demonstrated=True)])
    seen = {s: {world.get(s, i).messages[-1].text for i in range(300)} for s in SPLITS}
    seen["demonstrated"] = {conversation[1].text for conversation in world.demonstrations(300)}
    assert len(seen["train"]) < 300
    assert seen["train"].isdisjoint(seen["test"])
    assert seen["train"].isdisjoint(seen["validation"])
    assert seen["validation"].isdisjoint(seen["test"])
    assert seen["demonstrated"].isdisjoint(seen["test"] | seen["validation"])


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 5), st.sampled_from(SPLITS))
def test_a_problem_depends_on_seed_split_and_index_only(i, seed, split):
    sizes = dict.fromkeys(SPLITS, 10_001)
    assert CalculatorWorld(seed=seed, **sizes).get(split, i) == CalculatorWorld(seed=seed, **sizes).get(
        split, i
    )


def test_families_take_turns():
    world = CalculatorWorld()
    size = len(FAMILIES)
    for round_ in range(4):
        domains = [world.get("train", round_ * size + k).domain for k in range(size)]
        assert sorted(domains) == sorted(family.name for family in FAMILIES)
    assert [world.get("train", i).domain for i in range(size)] != [f.name for f in FAMILIES]


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES], ids=lambda family: family.name)
def test_every_family_is_right_and_asks_what_it_says(family):
    rng = random.Random(7)
    for _ in range(200):
        question, expression, answer = family.generate(rng)
        assert "{" not in question
        assert question.rstrip(".").endswith(("?", "yes or no"))
        if expression is not None:
            assert shown(evaluate(expression)) == answer
            assert answer.isdigit()  # whole and not negative: a count of things
            # The operands of the expression stand in the question.
            assert set(re.findall(r"\d+", expression)) <= set(re.findall(r"\d+", question))
        elif answer not in ("yes", "no"):
            assert answer in re.findall(r"\d+", question)


def test_the_reward_is_the_final_answer_and_calls_may_cost():
    async def episode(world, *messages):
        environment = world.make()
        await environment.reset(task, seed=0)
        return [await environment.step(message) for message in messages][-1]

    task = CalculatorWorld(families=["multiply"]).get("train", 0)
    call = Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "2*3"}),))
    right, wrong = Message("assistant", f"Answer: {task.reference}"), Message("assistant", "Answer: 1")
    free, costly = CalculatorWorld(), CalculatorWorld(call_cost=0.125)

    mid = asyncio.run(episode(free, call))
    assert (mid.messages[0].text, mid.reward, mid.terminated) == ("6", 0.0, False)
    assert mid.info == {"tool_counts": {"calls": 1}}
    assert asyncio.run(episode(free, call, right)).reward == 1.0
    # a bare number where text is asked for is an expression too
    number = Message("assistant", tool_calls=(ToolCall("calculator", {"expression": 42}),))
    assert asyncio.run(episode(free, number)).messages[0].text == "42"
    assert asyncio.run(episode(free, right)).rewards == {"correct": 1.0}
    assert asyncio.run(episode(free, wrong)).reward == 0.0
    # 1 - 2 * 0.125
    paid = asyncio.run(episode(costly, call, call, right))
    assert paid.reward == 0.75
    assert paid.rewards == {"correct": 1.0, "calls": -0.25}


def test_demonstrations_show_only_the_easy_families_and_are_right():
    world = CalculatorWorld()
    demonstrated = {family.name for family in FAMILIES if family.demonstrated}
    assert 0 < len(demonstrated) < len(FAMILIES)
    conversations = world.demonstrations(40, seed=1)
    assert conversations == world.demonstrations(40, seed=1)
    assert conversations != world.demonstrations(40, seed=2)
    for conversation in conversations:
        roles = [message.role for message in conversation]
        assert roles in (
            ["system", "user", "assistant"],
            ["system", "user", "assistant", "tool", "assistant"],
        )
        assert split_of(conversation[1].text) == "train"
        assert conversation[-1].text.startswith("Answer: ")
        if len(roles) == 5:
            assert conversation[-1].text == f"Answer: {conversation[3].text}"
            assert conversation[3].tool_call_id == conversation[2].tool_calls[0].id


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'multiply'"):
        CalculatorWorld(families=["multipy"])
    with pytest.raises(ConfigError, match="families is empty"):
        CalculatorWorld(families=[])
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        CalculatorWorld().count("trian")
    with pytest.raises(DataError, match="0 to 9"):
        CalculatorWorld(train=10).get("train", 10)
    with pytest.raises(ConfigError, match="demonstrated"):
        CalculatorWorld(families=["age"]).demonstrations(1)
    constant = Family("constant", lambda rng: ("1 + 1?", "1+1", "2"))
    elsewhere = next(split for split in SPLITS if split != split_of("1 + 1?"))
    with pytest.raises(ConfigError, match="no problems in split"):
        CalculatorWorld(families=[constant]).get(elsewhere, 0)
