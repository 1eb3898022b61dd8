"""Exact arithmetic on text, for tools and graders: an allow-list over the syntax tree, never eval().

Integers and decimals are exact fractions throughout; sizes, powers and depth are bounded, so that no
expression takes noticeable time or memory.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from stepladder.errors import ToolError

MAX_LENGTH = 200  # characters of an expression
MAX_BITS = 400  # of a numerator or denominator: about 120 decimal digits
MAX_DECIMALS = 6  # shown of a result that is no integer

_ALLOWED = re.compile(r"[0-9.+\-*/%() ]*")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-", "·": "*", "\n": " ", "\t": " "})
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / // % ** ^ and parentheses; raises ToolError.

    >>> evaluate("(12 + 30) * 2"), evaluate("1/4")
    (Fraction(84, 1), Fraction(1, 4))
    """
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression).translate(_SPELLINGS).replace("^", "**").strip()
    if not text:
        raise ToolError("the expression is empty; write one such as '12 * (3 + 4)'")
    if len(text) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are read")
    if not _ALLOWED.fullmatch(text):
        wrong = next(char for char in text if not _ALLOWED.fullmatch(char))
        raise ToolError(f"cannot read {wrong!r} in {expression!r}; use numbers, + - * / ** and parentheses")
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError):
        raise ToolError(
            f"{expression!r} is no complete expression; write one such as '12 * (3 + 4)'"
        ) from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return _bounded(Fraction(repr(node.value)))  # 0.1 as written, not as the nearest binary float
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            if right == 0 and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
                raise ToolError("division by zero")
            return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    raise ToolError(f"cannot compute {ast.unparse(node)!r}; use numbers, + - * / ** and parentheses")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("a power must be a whole number, such as 2 ** 3")
    if base == 0 and exponent < 0:
        raise ToolError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent.numerator) > MAX_BITS:  # before computing it
        raise ToolError("the power is too large")
    power = exponent.numerator
    if bits <= 1:  # 0, 1 and -1: the power matters only as zero or not, even or odd
        power = power % 2 or 2 * bool(power)
    return _bounded(Fraction(base**power))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the number is too large")
    return value


def shown(value: Fraction) -> str:
    """A number as people write it: '84', '0.25', '0.333333' (rounded to MAX_DECIMALS).

    >>> shown(Fraction(1, 3)), shown(Fraction(-84))
    ('0.333333', '-84')
    """
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(abs(value) * 10**MAX_DECIMALS)
    whole, decimals = divmod(scaled, 10**MAX_DECIMALS)
    text = f"{whole}.{decimals:0{MAX_DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and scaled else text


_NUMBER = re.compile(r"(?<![\w.])[-−]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|(?<![\w.])[-−]?\d+(?:\.\d+)?")


def last_number(text: str) -> Fraction | None:
    """The last number in a text, or None: thousands commas, a sign and decimals are read.

    >>> last_number("12 boxes of 30: Answer: 1,360.")
    Fraction(1360, 1)
    """
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > MAX_LENGTH:
        return None
    return Fraction(found[-1].replace(",", "").replace("−", "-"))
