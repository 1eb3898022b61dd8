"""Memory by part, by hand, and the fullest moment."""

from __future__ import annotations

import inspect
from typing import Literal

import pytest
from test_shape import SMOL

from stepladder.objectives import logprobs
from stepladder.planning import memory
from stepladder.planning.memory import (
    Micro,
    Part,
    Trained,
    engine_parts,
    peak,
    slack_part,
    trained_parts,
    update_parts,
)
from stepladder.planning.shape import shape_of

SHAPE = shape_of(SMOL)
ALL = 134_515_008


def sizes(parts: list[Part]) -> dict[str, float]:
    return {part.name: part.bytes for part in parts}


def test_an_optimiser_in_half_precision() -> None:
    """Masters 4 bytes, moments 8 of each trainable parameter; the best epoch's copy 4 more."""
    model = Trained(name="p", shape=SHAPE, width=2, trainable=1000, copies_best=True)
    assert sizes(trained_parts(model)) == {
        "p: float32 masters": 4000,
        "p: Adam moments": 8000,
        "p: best epoch so far": 4000,
    }


def test_float32_weights_are_their_own_masters() -> None:
    assert sizes(trained_parts(Trained(name="p", shape=SHAPE, width=4, trainable=1000))) == {
        "p: Adam moments": 8000
    }


def test_an_update_of_several_micro_batches() -> None:
    """512 tokens: 30 layers of 27,648 bytes and the last state with its norm, 2·4·576. Two blocks of
    512 · 1,024 logits, the slopes of all and the head's gradient, in float32."""
    got = sizes(update_parts(Trained(name="p", shape=SHAPE, width=4, trainable=ALL), Micro(tokens=512)))
    assert got == {
        "gradients": 4 * ALL,
        "activations of a micro-batch": 512 * (30 * 27_648 + 8 * 576),
        "log-probabilities": 2 * 4 * 512 * 1024 + 4 * 512 * 49_152 + 4 * 49_152 * 576,
    }


@pytest.mark.parametrize(
    ("width", "tokens", "head", "wanted"),
    [
        # a block of all 16 rows; slopes of one chunk, 256 · 49,152, and the states' gradient
        (4, 16, "frozen", 2 * 4 * 16 * 1024 + 4 * 256 * 49_152 + 4 * 16 * 576),
        # in bfloat16 slopes, 512 · 49,152 · 2 = 50 MB, are kept; the gradient goes to the masters' by blocks
        (2, 512, "trained", 2 * 4 * 512 * 1024 + 2 * 512 * 49_152),
        # 1,366 tokens are too many to keep (134.3 MB of at most 134.2): logits again, in two chunks
        (2, 1366, "trained", 2 * 4 * 256 * 49_152 + 4 * 49_152 * 576),
    ],
)
def test_what_the_head_holds(
    width: int, tokens: int, head: Literal["frozen", "trained"], wanted: int
) -> None:
    model = Trained(name="p", shape=SHAPE, width=width, trainable=ALL)
    got = sizes(update_parts(model, Micro(tokens=tokens, head=head)))
    assert got["log-probabilities"] == wanted


def test_the_sizes_are_those_of_the_log_probabilities() -> None:
    default = inspect.signature(logprobs.chunked_logprobs).parameters["chunk"].default
    assert (default, logprobs.BLOCK_ROWS, logprobs.KEPT_BYTES) == (memory.CHUNK, memory.BLOCK, memory.KEPT)


def test_one_micro_batch_gives_back_as_it_fills() -> None:
    model = Trained(name="p", shape=SHAPE, width=4, trainable=ALL)
    few = sizes(update_parts(model, Micro(tokens=16, first=True, head="none")))
    many = sizes(update_parts(model, Micro(tokens=4096, first=True, head="none")))
    assert few == {"gradients": 4 * ALL}
    assert many == {"activations of a micro-batch": 4096 * (30 * 27_648 + 8 * 576)}


def test_a_critic_on_the_same_trunk_keeps_two_passes() -> None:
    model = Trained(name="p", shape=SHAPE, width=4, trainable=ALL)
    one, two = (sizes(update_parts(model, Micro(tokens=512, graphs=n))) for n in (1, 2))
    name = "activations of a micro-batch"
    assert two[name] == 2 * one[name]


def test_recomputed_layers_keep_their_inputs_and_one_of_them_all() -> None:
    """512 tokens of 30 layers · 576 · 4 bytes, 27,648 of one layer, and the last states twice in float32."""
    model = Trained(name="p", shape=SHAPE, width=4, trainable=ALL)
    got = sizes(update_parts(model, Micro(tokens=4096, head="none", recompute=True)))
    assert got["activations of a micro-batch"] == 4096 * (30 * 576 * 4 + 27_648 + 8 * 576)


def test_masks_grow_with_the_block() -> None:
    """A boolean mask becomes numbers of the compute type in each layer: 400 · 512 · 30 · 4 bytes."""
    model = Trained(name="p", shape=SHAPE, width=4, trainable=ALL)
    got = sizes(update_parts(model, Micro(tokens=512, block=400)))
    assert got["masks of shared prefixes"] == 400 * 512 * 30 * 4


def test_the_slack_is_a_share_of_what_comes_and_goes() -> None:
    parts = [Part("a", 10, ""), Part("b", 100, "", "update"), Part("c", 1000, "", "play")]
    assert slack_part(parts, adapter=False).bytes == pytest.approx(28)
    assert slack_part(parts, adapter=True).bytes == pytest.approx(290)


def test_the_engines_cache() -> None:
    """8 rows of 100 tokens, 11,520 numbers each, 2 bytes: 18,432,000."""
    got = sizes(engine_parts(SHAPE, 2, rows=8, length=100, packed=True, copy=False))
    assert got["key/value cache"] == 18_432_000
    assert got["engine's weights"] == 2 * 30 * 3_538_944


@pytest.mark.parametrize(("update", "play", "wanted"), [(5, 3, 15), (3, 5, 15), (0, 0, 10)])
def test_updating_and_playing_take_turns(update: int, play: int, wanted: int) -> None:
    parts = [Part("a", 10, ""), Part("b", update, "", "update"), Part("c", play, "", "play")]
    assert peak(parts) == wanted
