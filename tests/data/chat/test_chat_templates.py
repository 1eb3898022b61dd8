"""Conversations over the chat templates that trl ships: who wrote each token, and what a template edits.

The templates are read from trl's wheel, fetched once into the user cache: they are others' files and stay
out of this repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_scripts import ADD, ASK, CALL, SCRIPTS, make_renderer, natural_text, run, sampled, template_ids

from stepladder.types import Message, Sampling, Tool

TRL = "1.16.0"

# template -> tool format, then the first continuation of each script in SCRIPTS:
#   same   the next prompt is, id by id, what the template makes of the whole history
#   delta  the sampled ids stay; the template would spell the turn otherwise (an empty thinking block that it
#          adds or drops, two line breaks that merge across the end of the prompt, calls it cannot render)
#   split  the template takes something away from what was said: a new sample begins
TABLE = {
    "cohere": "plain same same same same same",
    "cohere2": "plain same same same same same",
    "deepseek_r1_distill": "plain split split split split split",
    "deepseekv3": "plain split split split split split",
    "diffusion_gemma": "plain same same same split split",
    "gemma": "plain same same same same same",
    "gemma3": "plain same same same same same",
    "gemma4": "plain same same same same same",
    "gemma4_v2": "plain same same same same same",
    "gemma4_v3": "plain same same same same same",
    "gemma4_v4": "plain same same same same same",
    "gemma4_v5": "plain same same same split split",
    "glm4moe": "plain same same same split split",
    "gptoss": "plain split split split split split",
    "idefics3": "plain same same same same same",
    "lfm2": "plain same same same same same",
    "lfm2_2_5": "plain same same same split split",
    "lfm2_2_5_v2": "plain same same same split split",
    "lfm2_2_5_vl": "plain same same same split split",
    "lfm2_v2": "plain same same same same same",
    "llama3": "plain same same same same same",
    "llama3_1": "llama_json same same delta same same",
    "llama3_2": "llama_json same same delta same same",
    "llava_next": "plain same same same same same",
    "muse_glimmer": "plain same same same same same",
    "nemotron_3_5_lightning": "function_xml split split split split same",
    "nemotron_3_nano": "function_xml split split split split same",
    "nemotron_3_super": "function_xml split split split split same",
    "nemotron_3_ultra": "function_xml split split split split same",
    "phi3": "plain same same same same same",
    "phi3_5": "plain same same same same same",
    "qwen2_5": "hermes same same same same same",
    "qwen2_5_vl": "plain same same same same same",
    "qwen3": "hermes delta delta delta split same",
    "qwen3_5_nothink": "function_xml split same same split delta",
    "qwen3_5_think": "function_xml split delta delta split same",
    "qwen3_6": "function_xml split delta delta split same",
    "qwen3_8": "function_xml delta delta delta same same",
    "qwen3_instruct_2507": "hermes same same same same same",
    "qwen3_vl": "hermes same same same same same",
    "smolvlm": "plain same same same same same",
}


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """name -> Jinja text of the templates in trl's wheel, training variants left out."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "stepladder" / "tests" / f"trl-{TRL}"
    wheel = folder / f"trl-{TRL}-py3-none-any.whl"
    if not wheel.exists():
        if os.environ.get("STEPLADDER_OFFLINE") == "1":
            pytest.skip("STEPLADDER_OFFLINE=1 and the trl wheel is not in the cache")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
        done = subprocess.run([*command, f"trl=={TRL}"], capture_output=True, text=True, timeout=240)
        if done.returncode or not wheel.exists():
            pytest.fail(
                f"the wheel of trl {TRL}, whose chat templates this test reads, could not be fetched; "
                f"set STEPLADDER_OFFLINE=1 to skip. pip said: {done.stderr[-400:]}"
            )
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            stem = Path(name).name.removesuffix(".jinja")
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                found[stem] = archive.read(name).decode()
    return {name: text for name, text in found.items() if not name.endswith("_training")}


def test_the_table_names_every_template(templates: dict[str, str]) -> None:
    assert sorted(TABLE) == sorted(templates)
    assert len(templates) >= 40


def test_the_table_has_every_kind_of_outcome() -> None:
    outcomes = Counter(outcome for row in TABLE.values() for outcome in row.split()[1:])
    assert set(outcomes) == {"same", "delta", "split"}
    assert outcomes["same"] > 100 > outcomes["split"] > 40


@pytest.mark.parametrize("name", TABLE)
def test_exactly_the_sampled_ids_are_trained(name: str, templates: dict[str, str]) -> None:
    renderer = make_renderer(name, templates[name])
    outcomes = []
    for script in SCRIPTS.values():
        held = run(renderer, script)
        outcomes.append(held.outcome)
        samples = held.conversation.samples("t", "g")
        assert len(samples) <= 1 + held.conversation.history_edits
        check_authorship(samples, held.sampled)
        # The first prompt is the template's own, and the stop token is the last trained id of every turn.
        tools, opening, _ = script
        if renderer.dialect.system or opening[0].role != "system":
            first = held.conversation.turns[0].prompt_ids
            assert list(first) == template_ids(renderer, opening, tools)
        assert all(ids[-1] in renderer.stop_token_ids for ids in held.sampled)
    assert " ".join([renderer.tool_format.name, *outcomes]) == TABLE[name]


def check_authorship(samples: Any, sampled: list[tuple[int, ...]]) -> None:
    """Every sampled id is trained once, with its own log-probability; no other id is."""
    trained: dict[int, list[tuple[int, float]]] = {}
    for sample in samples:
        assert sample.trajectory_id == "t"
        for token, mask, logprob, turn in zip(
            sample.token_ids, sample.mask, sample.behaviour_logprobs, sample.turn_ids, strict=True
        ):
            assert mask == (turn >= 0) == (logprob < 0)
            if mask:
                trained.setdefault(turn, []).append((token, logprob))
    expected = {
        turn: [(token, -0.01 * (i + 1)) for i, token in enumerate(ids)] for turn, ids in enumerate(sampled)
    }
    assert trained == expected


@pytest.mark.parametrize("name", TABLE)
def test_demonstrations_train_the_assistants_words_and_terminator(
    name: str, templates: dict[str, str]
) -> None:
    renderer = make_renderer(name, templates[name])
    for script_name, (tools, opening, steps) in SCRIPTS.items():
        if script_name == "parallel" and renderer.tool_format.name == "llama_json":
            continue  # this template raises on two calls in one message
        messages = list(opening)
        turns = []
        for step in steps:
            if isinstance(step, Message):
                turns.append(natural_text(renderer, messages, step, tools))
                messages.append(step)
            else:
                messages += step
        samples = renderer.demonstration(messages, tools, trajectory_id="t")
        own: dict[int, list[int]] = {}
        for sample in samples:
            assert any(sample.mask)
            assert set(sample.behaviour_logprobs) == {0.0}
            for token, mask, turn in zip(sample.token_ids, sample.mask, sample.turn_ids, strict=True):
                if mask:
                    own.setdefault(turn, []).append(token)
        assert len(own) == len(turns)
        for ids, text in zip(own.values(), turns, strict=True):
            assert ids[-1] in renderer.stop_token_ids
            if "think" in script_name or not renderer.dialect.reasoning:
                spelled = renderer.decode(ids)
                assert "".join(spelled.split()) == "".join(text.split())


@pytest.mark.parametrize("name", TABLE)
def test_markers_in_content_never_become_control_tokens(name: str, templates: dict[str, str]) -> None:
    renderer = make_renderer(name, templates[name])
    markers = list(renderer.control.ids)
    poison = " ".join(f"x{marker}y" for marker in markers)
    clean = " ".join("xy" for _ in markers)

    def control_ids(text: str) -> Counter[int]:
        tool = Tool("add", f"Adds. {text}", ADD.parameters)
        conversation = renderer.start([Message("user", f"Read this: {text}")], [tool])
        call = natural_text(renderer, [ASK], Message("assistant", "", (CALL,)), [ADD])
        conversation.add_turn(sampled(renderer, call), Sampling())
        conversation.add_messages([Message("tool", text, tool_call_id=CALL.id, name="add")])
        known = set(renderer.control.ids.values())
        return Counter(i for i in conversation.prompt_ids if i in known)

    assert control_ids(poison) == control_ids(clean)
