"""Families of word problems, as a table. Each draws its own numbers; what is asked is in the template.

Letters in a template: a, b, c, d are two-digit numbers, p, q, r three-digit ones, and u, v, w of either size;
{a*b} style entries are computed from them. `name`, `things`, `others` are words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from stepladder.environments.worlds.arithmetic import evaluate, shown

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
    letters = sorted(set(re.findall(r"[a-dp-ru-w]", expression + "".join(_slots(templates)))))

    def generate(rng: random.Random) -> Problem:
        numbers = {letter: _number(letter, rng) for letter in letters}
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


def _number(letter: str, rng: random.Random) -> int:
    two_digits, three_digits = rng.randint(12, 99), rng.randint(101, 899)
    if letter in "uvw":
        return rng.choice((two_digits, three_digits))
    return two_digits if letter in "abcd" else three_digits


def _slots(templates: tuple[str, ...]) -> list[str]:
    slots = re.findall(r"\{([^}]*)\}", "".join(templates))
    return [slot for slot in slots if slot not in ("name", "things", "others")]


def _with_numbers(slot: str, numbers: dict[str, int]) -> str:
    return re.sub(r"[a-dp-ru-w]", lambda match: str(numbers[match[0]]), slot)


def _compare(rng: random.Random) -> Problem:
    big, small = rng.randint(12, 99) * 10, rng.randint(12, 99)
    name = rng.choice(_NAMES)
    things, others = rng.sample(_THINGS, 2)
    answer = rng.choice(("yes", "no"))
    first, second = (big, small) if answer == "yes" else (small, big)
    question = (
        f"{name} counts {first} {things} and {second} {others}. "
        f"Are there more {things} than {others}? Answer yes or no."
    )
    return question, None, answer


# The default set: demonstrations show one operation, one compound and two questions without the tool;
# the rest (longer chains, irrelevant numbers, another question without the tool) is left for reward to teach.
FAMILIES: tuple[Family, ...] = (
    Family(
        "add",
        worded(
            "{p}+{a}",
            "{name} has {p} {things} and buys {a} more. How many {things} does {name} have now?",
        ),
        demonstrated=True,
    ),
    Family(
        "subtract",
        worded(
            "{p}-{a}",
            "{name} had {p} {things} and gave away {a}. How many {things} are left?",
        ),
        demonstrated=True,
    ),
    Family(
        "multiply",
        worded(
            "{a}*{b}",
            "{name} fills {a} bags with {b} {things} each. How many {things} are there?",
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
            "{name} fills {a} bags with {b} {things} each and then finds {c} more. How many {things} "
            "are there?",
        ),
        demonstrated=True,
    ),
    Family(
        "house",
        worded(
            "{u}",
            "{name} lives at number {u} and has {v} {things}. What is the number of the house?",
            tool=False,
        ),
        demonstrated=True,
    ),
    Family(
        "other_count",
        worded(
            "{v}",
            "{name} has {u} {things} and {v} {others}. How many {others} does {name} have?",
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
            "{name} fills {a} bags with {b} {things} each and then gives away {c}. How many {things} "
            "are left?",
        ),
    ),
    Family(
        "multiply_add_subtract",
        worded(
            "{a}*{b}+{c}-{d}",
            "{name} fills {a} bags with {b} {things} each, then finds {c} more and gives away {d}. How "
            "many {things} are left?",
        ),
    ),
    Family(
        "add_distracted",
        worded(
            "{p}+{a}",
            "{name} is {b} years old. {name} has {p} {things} and buys {a} more. How many {things} does"
            " {name} have now?",
        ),
    ),
    Family(
        "subtract_distracted",
        worded(
            "{p}-{a}",
            "{name} had {p} {things} and {b} {others} and gave away {a} {things}. How many {things} are"
            " left?",
        ),
    ),
    Family(
        "multiply_distracted",
        worded(
            "{a}*{b}",
            "{name} is {c} years old. {name} fills {a} bags with {b} {things} each. How many {things} "
            "are there?",
        ),
    ),
    Family(
        "age",
        worded(
            "{a}",
            "{name} is {a} years old and has {v} {things}. How old is {name}?",
            tool=False,
        ),
    ),
)

# Further ones, for `families=`.
MORE_FAMILIES: tuple[Family, ...] = (
    Family(
        "price",
        worded(
            "{u}",
            "A bag with {v} {things} costs {u} dollars. How many dollars does the bag cost?",
            tool=False,
        ),
    ),
    Family(
        "change",
        worded(
            "{a*b+c}-{a}*{b}",
            "{name} buys {a} {things} for {b} dollars each and pays with {a*b+c} dollars. How many "
            "dollars does {name} get back?",
        ),
    ),
    Family(
        "two_products",
        worded(
            "{a}*{b}+{c}*{d}",
            "A shop has {a} boxes of {b} {things} and {c} boxes of {d} {others}. How many items is that?",
        ),
    ),
    Family(
        "per_day",
        worded(
            "({a}+{b})*{c}",
            "Each day {name} sells {a} {things} and {b} {others}. How many items is that in {c} days?",
        ),
    ),
    Family(
        "three_factors",
        worded(
            "{a}*{b}*{c}",
            "There are {a} shelves with {b} boxes each, and {c} {things} in each box. How many {things}"
            " are there?",
        ),
    ),
    Family("compare", _compare),
)
