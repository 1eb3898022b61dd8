"""SFT on files: every format, what `train` and `max_tokens` do, and what is said of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from spine import SIZES, lines

from stepladder import ladder
from stepladder.commands.inspect import inspect_recipe
from stepladder.data.files.records import Demonstration
from stepladder.environments.environment import as_world
from stepladder.environments.worlds.hidden_digit import HiddenDigitWorld
from stepladder.errors import CheckpointError, ConfigError, DataError
from stepladder.recipe.config import Recipe, load_recipe
from stepladder.recipe.sft import SftSection
from stepladder.run.progress import Display
from stepladder.rungs.demonstrations import SftData, sft_data
from stepladder.rungs.registry import prepare_run
from stepladder.rungs.sft_rows import SftRows, made_conversations
from stepladder.types import Message
from stepladder.workbench import prepare as setup


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(data: Path, *overrides: str) -> Recipe:
    sections = {
        "run": {"name": "run", "out": str(data.parent), "threads": 1},
        "model": {"name": "tiny", "dtype": "float32", "options": SIZES},
        "sft": {"data": str(data), "epochs": 1, "batch_size": 4, "validation": 2},
    }
    return load_recipe(sections, overrides)


def prepared(data: Path, *overrides: str) -> tuple[SftData, Callable[[Any], str]]:
    """(the data of SFT, the trained text of a sample)."""
    settings = recipe(data, *overrides)
    bench = prepare_run(settings)
    try:
        assert settings.sft is not None
        found = sft_data(bench, settings.sft, seed=0)
    finally:
        bench.close()

    def trained(sample: Any) -> str:
        return bench.renderer.decode([t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m])

    return found, trained


FILES: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": chat(f"{i}?", f"{i}.")} for i in range(6)],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"{i}."}]}
        for i in range(6)
    ],
    "alpaca": [{"instruction": f"{i}?", "input": "", "output": f"{i}."} for i in range(6)],
    "preferences": [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "no"} for i in range(6)],
    "thumbs": [{"prompt": f"{i}?", "completion": f"{i}.", "label": 1} for i in range(6)],
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_samples(tmp_path: Path, name: str) -> None:
    data, trained = prepared(write(tmp_path / "d.jsonl", FILES[name]))
    assert sorted(trained(s) for s in [*data.train, *data.held]) == [f"{i}.<|end|>" for i in range(6)]
    assert (len(data.train), len(data.held)) == (4, 2)
    assert data.tally.text == "6 rows: 6 kept"
    if name != "messages":
        return
    text = data.text
    assert text == "d.jsonl: 6 conversations (column messages); 6 rows: 6 kept"


def test_a_run_on_a_file_says_what_it_was_trained_on(tmp_path: Path) -> None:
    rows = [
        *FILES["preferences"],
        FILES["preferences"][0],
        {"prompt": "?", "chosen": "4" * 90, "rejected": ""},
    ]
    rows[-1]["rejected"] = "5"
    path = write(tmp_path / "pairs.jsonl", rows)
    console = Console(record=True, width=400, file=io.StringIO())
    run = ladder.train(recipe(path, "sft.max_tokens=40"), display=Display(console))
    facts = json.loads((run / "data.json").read_text())["sft"]
    assert facts["text"] == (
        "pairs.jsonl: 8 preferences (columns prompt, chosen, rejected) -> 8 conversations (the chosen side); "
        "1 repeated row left out; 7 rows: 6 kept, 1 dropped (over max_tokens=40: 1)"
    )
    assert f"sft: {facts['text']}" in console.export_text()
    summary = " ".join((run / "summary.txt").read_text().split())
    assert f"Data sft: {facts['text']}" in summary
    assert [line["step"] for line in lines(run / "metrics.jsonl") if "nll" in line]


def test_a_resumed_run_refuses_other_data(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", FILES["messages"])
    run = ladder.train(recipe(path), display=Display(quiet=True))
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)  # as if it had been killed before the first one
    write(path, [*FILES["messages"][:5], {"messages": chat("5?", "6.")}])
    with pytest.raises(CheckpointError, match=r"data of the rung 'sft' changed .* put the old data back"):
        ladder.resume(run, display=Display(quiet=True))
    write(path, FILES["messages"])
    ladder.resume(run, display=Display(quiet=True))


def test_train_says_what_is_learned(tmp_path: Path) -> None:
    history = [*chat("a", "b"), {"role": "user", "content": "c"}]
    answer = [{"role": "assistant", "content": "d"}, {"role": "tool", "content": "e"}, *chat("", "f")[1:]]
    path = write(tmp_path / "d.jsonl", [{"prompt": history, "completion": answer}])

    def trained(train: str) -> str:
        data, shown = prepared(path, f"sft.train={train}", "sft.validation=0")
        return shown(data.train[0])

    assert trained("assistant") == "d<|end|>f<|end|>"  # not "b": it is what the prompt says
    assert trained("last_turn") == "f<|end|>"
    completion = trained("completion")
    assert completion.startswith("d<|end|>")
    assert completion.endswith("f<|end|>")
    assert "e" in completion
    assert trained("full").count("<|end|>") > completion.count("<|end|>")


def test_texts_are_trained_in_full_and_split_where_they_are_long(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": c * 20} for c in "abc"] + [{"text": "short"}])
    with pytest.raises(ConfigError, match=r'sft.train=\'assistant\' needs turns .*; try sft.train = "full"'):
        prepared(path)
    data, shown = prepared(path, "sft.train=full", "sft.validation=0")
    assert shown(data.train[0]) == "a" * 19 + "<|end|>"  # no BOS: nothing stands before the first
    cut, shown = prepared(path, "sft.train=full", "sft.validation=0", "sft.max_tokens=12", "sft.overlong=cut")
    assert cut.tally.text == "4 rows: 4 kept, 3 texts split"
    assert "".join(shown(s) for s in cut.train[:2]) == "a" * 19 + "<|end|>"
    dropped, _ = prepared(path, "sft.train=full", "sft.validation=0", "sft.max_tokens=12")
    assert dropped.tally.text == "4 rows: 1 kept, 3 dropped (over max_tokens=12: 3)"


def test_overlong_rows_are_cut_or_dropped(tmp_path: Path) -> None:
    """<|bos|><|user|>?<|end|><|assistant|> and the answer: 5 tokens before it."""
    path = write(tmp_path / "d.jsonl", [{"messages": chat("?", "x" * n)} for n in (3, 30)])
    none = ("sft.validation=0",)
    cut, shown = prepared(path, *none, "sft.max_tokens=10", "sft.overlong=cut")
    assert [shown(s) for s in cut.train] == ["xxx<|end|>", "xxxxx"]
    assert cut.tally.text == "2 rows: 2 kept, 1 completion cut, without a terminator (26 tokens lost)"
    for limit, overlong, reason in (
        (5, "cut", "nothing to learn within max_tokens=5: 2"),
        (5, "drop", "over max_tokens=5: 2"),
    ):
        with pytest.raises(DataError, match=rf"nothing is left to train on: 2 rows: 0 kept, .*{reason}"):
            prepared(path, *none, f"sft.max_tokens={limit}", f"sft.overlong={overlong}")
    with pytest.raises(ConfigError, match=r"cuts nothing without a limit; try sft.max_tokens = 1024"):
        recipe(path, "sft.overlong=cut")


@pytest.mark.parametrize(
    ("rows", "override", "reason"),
    [
        (FILES["messages"], "sft.train=completion", 'are conversations .*; try sft.train = "assistant"'),
        ([{"prompt": "a", "steps": ["b"]}], "sft.validation=0", "cannot be used as conversations"),
        (FILES["messages"], "sft.validation=6", "6 conversations, sft.validation holds back 6; try .* = 1"),
        ([FILES["messages"][0]] * 3, "sft.validation=1", "nothing would be left to train on|belong together"),
    ],
)
def test_data_that_do_not_suit_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    override: str,
    reason: str,
) -> None:
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    with pytest.raises((DataError, ConfigError), match=reason):
        prepare_run(recipe(write(tmp_path / "d.jsonl", rows), override))


class FewWords(HiddenDigitWorld):
    """Makes no more than `kinds` different conversations, whatever is asked."""

    kinds = 1

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        texts = [str((seed * 4 + i) % self.kinds) for i in range(count)]
        return [[Message("user", f"{t}?"), Message("assistant", t)] for t in texts]


def made(monkeypatch: pytest.MonkeyPatch, kinds: int, **sft: Any) -> SftRows:
    monkeypatch.setattr(FewWords, "kinds", kinds)
    settings = SftSection(**{"demonstrations": 4, "validation": 3, **sft})
    train, held, said = made_conversations(as_world(FewWords()), settings, 0)
    return SftRows([Demonstration(tuple(c)) for c in train], [Demonstration(tuple(c)) for c in held], said)


def test_held_out_demonstrations_that_training_has_too_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 kinds training has 0 to 3; from the next seed come 4, 0 and 1: one of the three is new."""
    rows = made(monkeypatch, 5)
    assert [r.messages[0].text for r in rows.held] == ["4?"]
    assert rows.description == (
        "5 demonstrations of the environment; 2 of 3 left out of those held out, which training has too"
    )
    assert made(monkeypatch, 100).description == "7 demonstrations of the environment"


def test_a_world_that_leaves_nothing_to_hold_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a held-out row there would be no early stop, and all ten epochs would be run."""
    message = r"sft\.validation=3 holds nothing out: the 4 demonstrations .*are 1 different .*validation = 0"
    with pytest.raises(ConfigError, match=message):
        made(monkeypatch, 1)
    assert not made(monkeypatch, 1, validation=0).held
    assert not made(monkeypatch, 1, epochs=0).held  # rows for rl.replay: nothing is validated
    sections = {
        "run": {"name": "run", "out": str(tmp_path)},
        "model": {"name": "tiny", "options": SIZES},
        "environment": {"name": "test_sft_data:FewWords"},
        "sft": {"demonstrations": 4, "validation": 3},
    }
    monkeypatch.setattr(setup, "build_policy", lambda recipe: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        prepare_run(load_recipe(sections))


def test_a_row_that_the_template_cannot_show_is_named_by_its_beginning(tmp_path: Path) -> None:
    row = {"messages": chat("What is 1+1?", "2"), "tools": [{"function": {"name": "add"}}]}
    options = {**SIZES, "symbols": list("abc?")}  # an alphabet that spells no tools
    settings = recipe(write(tmp_path / "d.jsonl", [row] * 3), "sft.validation=0")
    settings = load_recipe(
        {**settings.model_dump(exclude_none=True), "model": {"name": "tiny", "options": options}}
    )
    bench = prepare_run(settings)
    try:
        with pytest.raises(DataError, match=r"the conversation that begins 'What is 1.1.': .*shows no tools"):
            sft_data(bench, settings.sft, seed=0)  # type: ignore[arg-type]
    finally:
        bench.close()


@pytest.mark.parametrize("name", ["preferences", "texts"])
def test_inspect_shows_the_data(tmp_path: Path, name: str) -> None:
    rows = FILES.get(name, [{"text": f"Once {i}."} for i in range(6)])
    train = "full" if name == "texts" else "assistant"
    console = Console(record=True, width=200, file=io.StringIO())
    inspect_recipe(
        recipe(write(tmp_path / "d.jsonl", rows), f"sft.train={train}"), samples=1, console=console
    )
    text = console.export_text()
    assert "4 samples to train on, 2 held out" in text
    assert "d.jsonl: 6 " in text
    assert "6 rows: 6 kept" in text
