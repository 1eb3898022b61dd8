"""Plausible wrong solutions of calculator problems: what the worse side of a preference says."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from stepladder.environments.worlds.arithmetic import evaluate, last_number, shown
from stepladder.environments.worlds.families import Problem
from stepladder.errors import ToolError
from stepladder.types import Message, ToolCall

_OTHER_OPERATION = {"+": "-", "-": "+", "*": "+", "/": "*"}


def mistaken(problem: Problem, rng: random.Random) -> list[Message]:
    """A wrong solution, of a kind that small models produce: a guess without a call, a wrong operation, a
    wrong number in the expression, or a result that is misread. The calculator in it is always right."""
    _, expression, answer = problem
    if expression is None:
        return [_final(_other_answer(answer, rng))]
    kinds: list[Callable[[str, str, random.Random], list[Message] | None]]
    kinds = rng.sample([_guess, _wrong_operation, _wrong_number, _misread], 4)
    found = (kind(expression, answer, rng) for kind in kinds)
    return next(messages for messages in found if messages is not None)  # _guess always finds one


def _guess(expression: str, answer: str, rng: random.Random) -> list[Message] | None:
    return [_final(_other_answer(answer, rng))]


def _misread(expression: str, answer: str, rng: random.Random) -> list[Message] | None:
    return [*_called(expression, answer), _final(_other_answer(answer, rng))]


def _wrong_operation(expression: str, answer: str, rng: random.Random) -> list[Message] | None:
    signs = [m.start() for m in re.finditer(r"[+\-*/]", expression)]
    if not signs:
        return None
    at = rng.choice(signs)
    wrong = expression[:at] + _OTHER_OPERATION[expression[at]] + expression[at + 1 :]
    return _worked(wrong, answer)


def _wrong_number(expression: str, answer: str, rng: random.Random) -> list[Message] | None:
    number = rng.choice(list(re.finditer(r"\d+", expression)))
    wrong = expression[: number.start()] + _other_number(number.group(), rng) + expression[number.end() :]
    return _worked(wrong, answer)


def _worked(expression: str, answer: str) -> list[Message] | None:
    """A wrong expression worked out; None where it has no value, or the right one by chance."""
    try:
        result = shown(evaluate(expression))
    except ToolError:
        return None
    if last_number(result) == last_number(answer):
        return None
    return [*_called(expression, result), _final(result)]


def _called(expression: str, result: str) -> list[Message]:
    call = ToolCall("calculator", {"expression": expression}, id="call_0")
    return [
        Message("assistant", tool_calls=(call,)),
        Message("tool", result, tool_call_id=call.id, name=call.name),
    ]


def _final(answer: str) -> Message:
    return Message("assistant", f"Answer: {answer}")


def _other_answer(answer: str, rng: random.Random) -> str:
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    return re.sub(r"\d+", lambda m: _other_number(m.group(), rng), answer, count=1)


def _other_number(digits: str, rng: random.Random) -> str:
    """A number of as many digits, one of them changed."""
    at = rng.randrange(len(digits))
    lowest = 1 if at == 0 and len(digits) > 1 else 0
    other = rng.choice([d for d in "0123456789"[lowest:] if d != digits[at]])
    return digits[:at] + other + digits[at + 1 :]
