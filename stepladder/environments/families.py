"""Families of word problems, as a table. Each draws its own numbers; what is asked is in the template.

Letters in a template: a, b, c, d are two-digit numbers, p, q, r three-digit ones, u and v either (so that no
rule by size tells them apart); {a*b} style entries are computed from them. `name`, `things`, `others` are words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from stepladder.environments.arithmetic import evaluate, shown

# (question, the expression that a calculator should be given or None, the answer)
Problem = tuple[str, str | None, str]

# fmt: off
_NAMES = (
    "Ana", "Bo", "Chen", "Dora", "Eli", "Fay", "Gita", "Hugo", "Ines", "Jon",
    "Kim", "Leo", "Maya", "Nils", "Olga", "Paul", "Rita", "Sami", "Tess", "Vera",
)
_THINGS = (
    "plums", "pencils", "maps", "tiles", "buttons", "ribbons",
    "tickets", "seeds", "candles", "keys", "bricks", "magnets",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of problem. `demonstrated`: shown in the warm start; the others only reward can teach."""

    name: str
    generate: Callable[[random.Random], Problem]
    demonstrated: bool = False


def worded(expression: str, *templates: str, tool: bool = True) -> Callable[[random.Random], Problem]:
    """A generator from templates that share one expression; `tool=False`: answered without the tool."""
    letters = sorted(set(re.findall(r"[a-dp-ruv]", expression + "".join(_slots(templates)))))

    def generate(rng: random.Random) -> Problem:
        numbers = {letter: _draw(letter, rng) for letter in letters}
        name = rng.choice(_NAMES)
        things, others = rng.sample(_THINGS, 2)
        words = {"name": name, "things": things, "others": others}

        def fill(match: re.Match[str]) -> str:
            slot = match[1]
            return words[slot] if slot in words else shown(evaluate(_with_numbers(slot, numbers)))

        question = re.sub(r"\{([^}]*)\}", fill, rng.choice(templates))
        filled = re.sub(r"\{([^}]*)\}", fill, expression)
        return question, filled if tool else None, shown(evaluate(filled))

    return generate


def _draw(letter: str, rng: random.Random) -> int:
    short = letter < "p" or (letter in "uv" and rng.random() < 0.5)
    return rng.randint(12, 99) if short else rng.randint(101, 899)


def _slots(templates: tuple[str, ...]) -> list[str]:
    slots = re.findall(r"\{([^}]*)\}", "".join(templates))
    return [slot for slot in slots if slot not in ("name", "things", "others")]


def _with_numbers(slot: str, numbers: dict[str, int]) -> str:
    return re.sub(r"[a-dp-ruv]", lambda match: str(numbers[match[0]]), slot)


# Six easy families are demonstrated: the four operations, one compound expression, one number read off the
# text. Nothing shows the others: a second operation in other words, three operations, an irrelevant number,
# other questions that need no tool.
FAMILIES: tuple[Family, ...] = (
    Family(
        "add",
        worded(
            "{p}+{a}", "{name} has {p} {things} and buys {a} more. How many {things} does {name} have now?"
        ),
        demonstrated=True,
    ),
    Family(
        "subtract",
        worded("{p}-{a}", "{name} had {p} {things} and gave away {a}. How many {things} are left?"),
        demonstrated=True,
    ),
    Family(
        "multiply",
        worded(
            "{a}*{b}", "{name} packs {a} boxes with {b} {things} in each box. How many {things} are there?"
        ),
        demonstrated=True,
    ),
    Family(
        "divide",
        worded(
            "{a*b}/{b}",
            "{name} shares {a*b} {things} equally among {b} friends. How many {things} does each friend get?",
        ),
        demonstrated=True,
    ),
    Family(
        "multiply_add",
        worded(
            "{a}*{b}+{c}",
            "{name} packs {a} boxes with {b} {things} in each box and then finds {c} more. "
            "How many {things} are there?",
        ),
        demonstrated=True,
    ),
    Family(
        "house_number",
        worded(
            "{u}",
            "{name} lives in house number {u} and has {v} {things}. What is the house number?",
            tool=False,
        ),
        demonstrated=True,
    ),
    Family(
        "add_subtract",
        worded(
            "{p}+{a}-{b}",
            "{name} has {p} {things}, buys {a} more and then loses {b}. How many {things} are left?",
        ),
    ),
    Family(
        "multiply_subtract",
        worded(
            "{a}*{b}-{c}",
            "{name} packs {a} boxes with {b} {things} in each box and then gives away {c}. "
            "How many {things} are left?",
        ),
    ),
    Family(
        "three_operations",
        worded(
            "{a}*{b}+{c}-{d}",
            "{name} packs {a} boxes with {b} {things} in each box, then finds {c} more and gives away {d}. "
            "How many {things} are left?",
        ),
    ),
    Family(
        "add_distracted",
        worded(
            "{p}+{a}",
            "{name} is {b} years old. {name} has {p} {things} and buys {a} more. "
            "How many {things} does {name} have now?",
        ),
    ),
    Family(
        "subtract_distracted",
        worded(
            "{p}-{a}",
            "{name} had {p} {things} and {b} {others} and gave away {a} {things}. "
            "How many {things} are left?",
        ),
    ),
    Family(
        "multiply_distracted",
        worded(
            "{a}*{b}",
            "{name} is {c} years old. {name} packs {a} boxes with {b} {things} in each box. "
            "How many {things} are there?",
        ),
    ),
    Family(
        "age", worded("{a}", "{name} is {a} years old and has {v} {things}. How old is {name}?", tool=False)
    ),
    Family(
        "price",
        worded(
            "{u}",
            "A box with {v} {things} costs {u} dollars. How many dollars does the box cost?",
            tool=False,
        ),
    ),
)
