"""Tools from signatures: the schema a model is shown, and what a call's arguments become."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from stepladder.environments.docstrings import parse_docstring
from stepladder.environments.probes import example, schema_problems
from stepladder.environments.schema import check_against_schema, spec_of, tool_from_function
from stepladder.environments.tools import tool, tools_of
from stepladder.errors import ConfigError, ToolError
from stepladder.types import Tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Window(TypedDict):
    width: int


class Node(BaseModel):
    value: int
    children: list["Node"] = []


def paint(
    where: Point,
    colour: Colour,
    mode: Literal["fast", "slow"] = "fast",
    layers: list[int] | None = None,
    extra: Optional[dict[str, float]] = None,  # noqa: UP045
    size: int | str = 3,
    window: Window | None = None,
    title: str = "none",
    strength: Annotated[float, Field(ge=0, le=1)] = 0.5,
    note: Annotated[str, "shown below"] = "",
) -> str:
    """Paint a point.

    And nothing else,
    whatever happens.

    Args:
        where: the point
        colour (Colour): which colour,
            in words
        mode: how

    Returns:
        where: not a parameter description
    """
    return f"{where.x},{where.y} {colour.value} {mode} {layers} {size} {strength}"


def test_the_schema_of_a_rich_signature():
    made = tool_from_function(paint)
    assert made.name == "paint"
    assert made.description == "Paint a point.\n\nAnd nothing else, whatever happens."
    assert made.parameters["required"] == ["where", "colour"]
    properties = made.parameters["properties"]
    assert list(properties) == [
        "where", "colour", "mode", "layers", "extra", "size", "window", "title", "strength", "note",
    ]  # fmt: skip
    assert properties["where"] == {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
        "required": ["x"],
        "additionalProperties": False,
        "description": "the point",
    }
    assert properties["colour"] == {
        "type": "string",
        "enum": ["red", "blue"],
        "description": "which colour, in words",
    }
    assert properties["mode"] == {
        "type": "string",
        "enum": ["fast", "slow"],
        "default": "fast",
        "description": "how",
    }
    assert properties["layers"] == {
        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
        "default": None,
    }
    assert properties["size"] == {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3}
    assert properties["title"] == {"type": "string", "default": "none"}
    assert properties["strength"] == {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5}
    assert properties["note"]["description"] == "shown below"
    assert schema_problems(made.parameters) == []


def test_arguments_arrive_as_the_function_takes_them():
    checked = spec_of(paint).check({"where": {"x": "3"}, "colour": "blue", "layers": [1, "2"]})
    assert checked == {"where": Point(3, 0), "colour": Colour.BLUE, "layers": [1, 2]}
    assert paint(**checked) == "3,0 blue fast [1, 2] 3 0.5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"where": {"x": 1}}, "argument 'colour' is missing"),
        ({"where": {"x": 1}, "color": "red"}, "no argument 'color'. Did you mean 'colour'?"),
        ({"where": {"x": "one"}, "colour": "red"}, "argument 'where.x' is 'one'"),
        ({"where": {"x": 1}, "colour": "green"}, "argument 'colour' is 'green'"),
        ({"where": {"x": 1}, "colour": "red", "mode": 3}, "argument 'mode' is 3"),
        ({"where": "{}", "colour": "red"}, "argument 'where' is '{}'"),
        ({"where": {"x": 1}, "colour": "red", "strength": 2}, "argument 'strength' is 2"),
        ({"where": {"x": 1.5}, "colour": "red"}, "argument 'where.x' is 1.5"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ToolError) as caught:
        spec_of(paint).check(arguments)
    assert message in str(caught.value)


def test_a_type_that_contains_itself_keeps_its_definition():
    def plant(tree: Node) -> int:
        return tree.value

    parameters = tool_from_function(plant).parameters
    assert "Node" in parameters["$defs"]
    assert (
        spec_of(plant).check({"tree": {"value": 1, "children": [{"value": 2}]}})["tree"].children[0].value
        == 2
    )


def test_names_that_pydantic_keeps_for_itself_are_fine():
    def f(schema: str, copy: int, model_config: str, json: bool) -> None:
        """F."""

    assert tool_from_function(f).parameters["required"] == ["schema", "copy", "model_config", "json"]
    arguments = {"schema": "a", "copy": "2", "model_config": "c", "json": "true"}
    assert spec_of(f).check(arguments) == {"schema": "a", "copy": 2, "model_config": "c", "json": True}


def untyped(a, b: int): ...
def starred(*args: int): ...
def keywords(a: int, **kwargs: int): ...
def by_position(a: int, /): ...
def callback(a: type): ...
def opaque(a: "NoSuchType"): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "write `a: str`"),
        (starred, "open-ended"),
        (keywords, "open-ended"),
        (by_position, "by position only"),
        (callback, "JSON"),
        (opaque, "type hints of tool 'opaque' cannot be read"),
        (lambda: 1, "needs a tool name"),
    ],
)
def test_signatures_that_no_model_can_use_are_refused(function, message):
    with pytest.raises(ConfigError) as caught:
        tool_from_function(function)
    assert message in str(caught.value)


GOOGLE = """Find things.

Args:
    query (str, optional): what to find: a word
        or several
    limit: how many

Returns:
    limit: nothing
"""
NUMPY = """Find things.

Parameters
----------
query : str
    what to find: a word
    or several
limit
    how many

Returns
-------
limit : int
    nothing
"""
REST = """Find things.

:param str query: what to find: a word
    or several
:param limit: how many
:type limit: int
:returns: nothing
"""


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_three_docstring_styles_say_the_same(text):
    assert parse_docstring(text) == (
        "Find things.",
        {"query": "what to find: a word or several", "limit": "how many"},
    )


def test_prose_that_looks_like_a_section_is_prose():
    text = "Parameters are kept.\n\nNote that this: is text."
    assert parse_docstring(text) == ("Parameters are kept.\n\nNote that this: is text.", {})


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_docstring_can_be_read(text):
    parse_docstring(text)


class Base:
    @tool
    def first(self, a: int) -> int:
        """One."""
        return a

    @tool(name="renamed")
    def second(self) -> str:
        return "base"


class Derived(Base):
    @staticmethod
    @tool
    def third(b: str) -> str:
        return b

    @tool(name="renamed")
    def second(self) -> str:
        return "derived"


def test_tools_of_a_class_and_of_an_object_agree():
    shapes = [(t.name, t.parameters) for t in tools_of(Derived)]
    assert shapes == [(t.name, t.parameters) for t in tools_of(Derived())]
    assert [name for name, _ in shapes] == ["first", "renamed", "third"]
    assert [p["required"] for _, p in shapes] == [["a"], [], ["b"]]
    bound = {t.name: t.function for t in tools_of(Derived())}
    assert (bound["first"](2), bound["renamed"](), bound["third"]("x")) == (2, "derived", "x")


def test_a_bad_decorator_is_refused():
    with pytest.raises(ConfigError, match=r"such as 5\.0"):
        tool(deadline=0)
    with pytest.raises(ConfigError, match="leave out one"):
        tool(inline=True, deadline=1.0)
    with pytest.raises(ConfigError, match="async"):

        @tool(inline=True)
        async def f() -> None: ...

    with pytest.raises(ConfigError, match="under @staticmethod"):
        tool(staticmethod(paint))


REMOTE = Tool(
    "remote",
    "elsewhere",
    {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": ["number", "null"]},
            "s": {"type": "string"},
            "free": {},
        },
        "required": ["n"],
    },
)


def test_a_hand_written_schema_is_checked_at_the_top():
    assert check_against_schema(REMOTE, {"n": " 5 ", "x": "1e3", "free": [1]}) == {
        "n": 5,
        "x": 1000.0,
        "free": [1],
    }
    assert check_against_schema(REMOTE, {"n": 2.0, "x": None}) == {"n": 2, "x": None}
    for arguments, message in [
        ({}, "'n' is missing"),
        ({"n": 1, "t": 1}, "no argument 't'"),
        ({"n": "five"}, "type integer"),
        ({"n": True}, "type integer"),
        ({"n": 2.5}, "type integer"),
        ({"n": 1, "s": 3}, "type string"),
    ]:
        with pytest.raises(ToolError, match=message):
            check_against_schema(REMOTE, arguments)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "a schema is a dict"),
        ({"type": "string"}, "are an 'object'"),
        ({"type": "object", "properties": {"a": {"type": "strng"}}}, "Did you mean 'string'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "requires 'a'"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "x"}}}},
            "a[] has type 'x'",
        ),
        ({"type": "object", "properties": []}, "maps names to schemas"),
    ],
)
def test_problems_of_a_schema_are_said(schema, problem):
    assert problem in schema_problems(schema)[0]


def test_example_arguments_fit_the_schema_they_were_made_from():
    def f(a: int, b: list[str], c: Literal["x", "y"], d: Point, e: bool, g: float | None, h: Any) -> None: ...

    spec = spec_of(f)
    assert spec.check(example(spec.tool.parameters))["d"] == Point(1, 0)
