"""What a ToolBox does with calls: right ones, wrong ones, slow ones, too many, too large."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder import deadlines
from stepladder.environments.tools import ToolBox, tool
from stepladder.errors import ConfigError, EnvironmentFault, ToolError
from stepladder.types import ImagePart, Message, TextPart, Tool, ToolCall


@tool
def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def ask(box: ToolBox, name: str = "add", error: str | None = None, **arguments) -> Message:
    return asyncio.run(box.call(ToolCall(name, arguments, id="7", error=error)))


def test_a_call_is_answered_with_its_id_and_name():
    assert ask(ToolBox([add]), a=2, b=3) == Message("tool", "5", tool_call_id="7", name="add")
    assert ask(ToolBox([add]), a="2").text == "2"


def test_fault_92_what_cannot_be_run_is_told_and_never_run():
    ran = []

    @tool(inline=True)
    def act(x: int) -> str:
        ran.append(x)
        return "done"

    box = ToolBox([act])
    assert "not valid JSON" in ask(box, "act", error="not valid JSON", x=1).text
    assert "Did you mean 'act'" in ask(box, "acts", x=1).text
    assert "'x' is missing" in ask(box, "act").text
    assert "no argument 'y'" in ask(box, "act", x=1, y=2).text
    assert "'x' is [1]" in ask(box, "act", x=[1]).text
    assert "'x' is None" in ask(box, "act", x=None).text
    assert ask(box, "").text.startswith("Error: there is no tool ''")
    assert ran == []
    assert box.counts == {"calls": 7, "malformed": 1, "unknown": 2, "invalid": 4}
    assert ask(ToolBox([]), "act").text == "Error: there is no tool 'act'. There are no tools."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.text(max_size=8) | st.just("add"), st.dictionaries(st.sampled_from("abc") | st.text(max_size=4), JSON)
)
def test_any_call_gets_one_tool_message(name, arguments):
    message = (
        ask(ToolBox([add]), name, None, **{})
        if not arguments
        else asyncio.run(ToolBox([add]).call(ToolCall(name, arguments)))
    )
    assert message.role == "tool"
    assert message.text


def test_what_a_tool_raises_is_told_and_counted():
    @tool
    def pick(kind: str) -> str:
        """Raise."""
        raise {"tool": ToolError("try again"), "value": ValueError("bad"), "key": KeyError("k")}[kind]

    @tool
    def leave() -> None:
        raise SystemExit(3)

    box = ToolBox([pick, leave])
    assert ask(box, "pick", kind="tool").text == "Error: try again"
    assert ask(box, "pick", kind="value").text == "Error: ValueError: bad"
    assert ask(box, "pick", kind="key").text == "Error: KeyError: 'k'"
    assert "sys.exit(3)" in ask(box, "leave").text
    assert box.counts["failed"] == 4


@pytest.mark.parametrize(
    "error",
    [
        TypeError,
        NameError,
        AttributeError,
        ImportError,
        AssertionError,
        NotImplementedError,
        EnvironmentFault,
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_a_mistake_in_the_tool_is_loud(error, inline):
    @tool(inline=inline)
    def wrong() -> str:
        raise error("mistake")

    with pytest.raises(error, match="mistake") as caught:
        ask(ToolBox([wrong]), "wrong")
    assert "raised by tool 'wrong'" in caught.value.__notes__[0]
    assert any(frame.name == "wrong" for frame in caught.traceback)


def test_fault_94_a_storm_of_calls_runs_no_more_than_the_cap():
    ran = []

    @tool(inline=True)
    def act(x: int) -> int:
        ran.append(x)
        return x

    box = ToolBox([act], max_calls_per_turn=8)
    messages = asyncio.run(box.call_all([ToolCall("act", {"x": i}, id=str(i)) for i in range(1000)]))
    assert ran == list(range(8))
    assert [m.text for m in messages[:8]] == [str(i) for i in range(8)]
    assert len(messages) == 9
    assert messages[8].text == (
        "Error: 992 of 1000 calls were not run; at most 8 calls may be made in one message."
    )
    assert messages[8].tool_call_id == "8"
    assert box.counts == {"calls": 8, "skipped": 992}


def test_fault_95_huge_output_is_cut_visibly():
    @tool(inline=True)
    def dump(n: int) -> str:
        return "x" * n

    @tool(inline=True)
    def fail() -> str:
        raise ToolError("y" * 5000)

    box = ToolBox([dump, fail], max_output_chars=2000)
    assert ask(box, "dump", n=1_000_000).text == "x" * 2000 + "... [cut: 998,000 of 1,000,000 characters]"
    assert ask(box, "dump", n=2000).text == "x" * 2000
    assert len(ask(box, "fail").text) < 2100
    assert box.counts["cut"] == 2


@dataclass
class Pair:
    left: int
    right: str


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (True, "true"),
        ([1, "é"], '[1,"é"]'),
        ({"a": (1, 2)}, '{"a":[1,2]}'),
        (Pair(1, "x"), '{"left":1,"right":"x"}'),
        (float("nan"), "NaN"),
    ],
)
def test_results_are_text_or_json(value, text):
    @tool(inline=True)
    def give() -> object:
        return value

    assert ask(ToolBox([give]), "give").text == text


def test_images_pass_and_what_json_cannot_carry_is_loud():
    @tool(inline=True)
    def give(what: str) -> object:
        image = ImagePart("data:image/png;base64,AA==")
        return {"image": image, "both": (TextPart("see"), image), "lock": threading.Lock()}[what]

    box = ToolBox([give])
    assert ask(box, "give", what="image").content == (ImagePart("data:image/png;base64,AA=="),)
    assert ask(box, "give", what="both").text == "see"
    with pytest.raises(TypeError, match="'give' returned a lock"):
        ask(box, "give", what="lock")


def test_json_results_are_json():
    @tool(inline=True)
    def give(value: dict) -> dict:
        return value

    value = {"a": [1, 2.5, None], "b": {"c": "x"}}
    assert json.loads(ask(ToolBox([give]), "give", value=value).text) == value


def test_fault_96_a_hung_plain_tool_is_abandoned_and_the_loop_stays_free():
    release = threading.Event()

    @tool(deadline=0.05)
    def hang() -> str:
        release.wait(30)
        return "late"

    async def main() -> tuple[Message, int]:
        beats = 0
        call = asyncio.create_task(box.call(ToolCall("hang")))
        while not call.done():
            await asyncio.sleep(0.005)
            beats += 1
        return call.result(), beats

    box = ToolBox([hang])
    before = deadlines.abandoned_threads()
    message, beats = asyncio.run(main())
    assert message.text == "Error: hang took longer than 0.05 s and was stopped"
    assert beats >= 3
    assert box.counts["deadline"] == 1
    assert deadlines.abandoned_threads() == before + 1
    release.set()
    limit = time.monotonic() + 10
    while deadlines.abandoned_threads() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert deadlines.abandoned_threads() == before


def test_fault_96_a_hung_async_tool_is_cancelled():
    cancelled = []

    @tool
    async def hang() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "late"

    box = ToolBox([hang], deadline=0.05)
    assert "took longer than 0.05 s" in ask(box, "hang").text
    assert cancelled == [True]


def test_plain_tools_run_beside_the_event_loop_and_async_ones_on_it():
    @tool
    def plain() -> bool:
        return threading.current_thread() is threading.main_thread()

    @tool
    async def waiting() -> bool:
        await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread()

    box = ToolBox([plain, waiting])
    assert ask(box, "plain").text == "false"
    assert ask(box, "waiting").text == "true"


def test_bad_boxes_are_refused():
    other = Tool("add", "", {"type": "object", "properties": {}})
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        ToolBox([add, other])
    with pytest.raises(ConfigError, match="limits above 0"):
        ToolBox([add], deadline=0)
    with pytest.raises(ConfigError, match="lives elsewhere"):
        ask(ToolBox([other]), "add")


def test_a_hand_written_schema_over_an_untyped_function():
    shown = Tool("twice", "", {"type": "object", "properties": {"n": {"type": "integer"}}}, lambda n: 2 * n)
    assert ask(ToolBox([shown]), "twice", n="4").text == "8"
