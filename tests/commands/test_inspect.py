"""The colours of `inspect`: who wrote each token, and what training does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from spine import digit_recipe

from stepladder.rungs.coloured import coloured
from stepladder.types import Message, TrainingSample
from stepladder.workbench.bench import Workbench
from stepladder.workbench.prepare import prepare

TALK = (
    Message("user", "?"),
    Message("assistant", "S"),
    Message("user", "3"),
    Message("assistant", "4"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    with contextlib.closing(prepare(digit_recipe(tmp_path_factory.mktemp("inspect")))) as made:
        yield made


def demonstration(bench: Workbench, talk: Sequence[Message], train: str = "assistant") -> TrainingSample:
    (one,) = bench.renderer.demonstration(talk, trajectory_id="demo-0", train=train)  # type: ignore[arg-type]
    return one


def styles(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def test_each_author_has_a_colour(bench: Workbench) -> None:
    sample = demonstration(bench, TALK)
    text = coloured(bench.renderer, sample, 1.0, TALK, turns=2)
    assert text.plain == bench.renderer.decode(sample.token_ids)
    assert styles(text) == [
        ("<|bos|><|user|>", "dim"),
        ("?", "cyan"),  # the prompt
        ("<|end|><|assistant|>", "dim"),
        ("S<|end|>", "green"),
        ("<|user|>", "dim"),
        ("3", "magenta"),  # the environment's answer
        ("<|end|><|assistant|>", "dim"),
        ("4<|end|>", "green"),
    ]


@pytest.mark.parametrize(("advantage", "style"), [(0.5, "green"), (-0.5, "red"), (0.0, "yellow")])
def test_the_policys_tokens_show_their_advantage(bench: Workbench, advantage: float, style: str) -> None:
    shown = styles(coloured(bench.renderer, demonstration(bench, TALK), advantage, TALK, turns=2))
    assert [piece for piece, found in shown if found == style] == ["S<|end|>", "4<|end|>"]


def test_an_assistants_turn_that_is_not_trained_and_context_that_is(bench: Workbench) -> None:
    last = styles(coloured(bench.renderer, demonstration(bench, TALK, "last_turn"), 1.0, TALK, turns=2))
    assert ("S<|end|>", "blue") in last
    assert ("4<|end|>", "green") in last
    full = styles(coloured(bench.renderer, demonstration(bench, TALK, "full"), 1.0, TALK, turns=2))
    assert ("?", "cyan underline") in full
    assert full[0] == ("<|bos|>", "dim")  # the first token has nothing to be predicted from


def test_assistant_messages_of_the_prompt_are_not_the_policys(bench: Workbench) -> None:
    """Worked examples in the opening: of four assistant messages the last one was sampled."""
    talk = (*TALK, *TALK[:1], Message("assistant", "2"))
    sample = demonstration(bench, talk, "last_turn")
    turn_ids = tuple(0 if t == 2 else -1 for t in sample.turn_ids)
    opened = TrainingSample(sample.token_ids, sample.mask, sample.behaviour_logprobs, "t", turn_ids, "g")
    shown = styles(coloured(bench.renderer, opened, 1.0, talk, turns=1))
    assert [piece for piece, style in shown if style == "blue"] == ["S", "4"]
    assert [piece for piece, style in shown if style == "cyan"] == ["?", "3", "?"]
    assert [piece for piece, style in shown if style == "green"] == ["2<|end|>"]


def test_what_cannot_be_placed_is_dim(bench: Workbench) -> None:
    sample = demonstration(bench, TALK)
    shown = styles(coloured(bench.renderer, sample, 1.0, (), turns=2))
    assert {style for _, style in shown} == {"dim", "green"}


def test_the_legend_names_every_colour(tmp_path: Path) -> None:
    import io

    from stepladder.commands.inspect import inspect_recipe

    console = Console(record=True, width=200, file=io.StringIO(), force_terminal=True)
    small = ("rl.tasks_per_step=2", "sft.demonstrations=20")
    inspect_recipe(digit_recipe(tmp_path, "run", *small), samples=20, console=console)
    text = console.export_text(styles=True)
    for code, what in (("36", "prompt"), ("35", "environment"), ("2", "template"), ("34", "not trained")):
        assert f"\x1b[{code}m{what}" in text
    assert "\x1b[36m?\x1b[0m" in text  # and they are used: the question, and the digit that a search reveals
    assert "\x1b[35m" in text.split("template", 1)[1].split("sft:", 1)[1]
