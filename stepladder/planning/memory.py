"""Memory of a rung by part, as arithmetic on sizes: bytes, and the basis of each number. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepladder.planning.shape import Shape, saved_bytes

LIBRARIES = 0.40e9  # Python, torch and transformers after their import, measured; on a GPU: its context
# objectives/logprobs.py: rows of logits at a time, or as many numbers in blocks of a head; bytes of slopes
CHUNK, BLOCK, KEPT = 256, 1024, 128 * 2**20
FLOAT = 4
# What the C allocator keeps in pieces, as a share of what comes and goes in an update: measured with glibc on
# the cases of bench/memory.py. An adapter has many temporaries, and copies of its inputs in float32.
SLACK, ADAPTER_SLACK = 0.28, 2.9

Phase = Literal["always", "update", "play"]


@dataclass(frozen=True, slots=True)
class Part:
    """Memory that is held in a phase: always, in an update only, or only while episodes are played."""

    name: str
    bytes: float
    basis: str
    phase: Phase = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that an optimiser trains: `trainable` of its `shape.parameters`, computed in `width` bytes.

    `copies_best`: the best epoch's weights are kept beside it. `owns_weights`: False where its weights are
    the policy's (a shared trunk), which stand there already.
    """

    name: str
    shape: Shape
    width: int
    trainable: int
    copies_best: bool = False
    owns_weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One micro-batch: `tokens` in a row; `graphs` passes alive at once (a critic on the policy's trunk: 2).

    `head`: log-probabilities over the vocabulary, with or without a gradient of the output layer.
    `first`: there is only one, so gradients fill up while activations are given back.
    """

    tokens: int
    graphs: int = 1
    head: Literal["none", "frozen", "trained"] = "trained"
    first: bool = False
    recompute: bool = False  # layers keep their inputs alone, and one at a time the rest
    block: int = 0  # tokens of a group that shares prefixes: its mask is a square, but on a CPU


def weights_part(name: str, shape: Shape, width: int, extra: int = 0) -> Part:
    """A model's weights, in a type of `width` bytes."""
    count = shape.parameters + extra
    return Part(name, count * width, f"{count:,} parameters × {width} bytes")


def trained_parts(model: Trained) -> list[Part]:
    """What an optimiser holds of a model, besides gradients: masters, two moments, the best epoch's copy."""
    n, out = model.trainable, []
    if model.width < FLOAT:
        out.append(Part(f"{model.name}: float32 masters", FLOAT * n, f"{n:,} trainable × 4 bytes"))
    out.append(Part(f"{model.name}: Adam moments", 2 * FLOAT * n, f"{n:,} trainable × 2 × 4 bytes"))
    if model.copies_best:
        out.append(Part(f"{model.name}: best epoch so far", FLOAT * n, f"{n:,} trainable × 4 bytes"))
    return out


def update_parts(model: Trained, micro: Micro) -> list[Part]:
    """What one update holds for a while: gradients, activations, chunks of the vocabulary.

    In a step of one micro-batch gradients and activations are never there in full together: autograd gives
    back a layer's activations as it writes its gradients, so the larger of the two counts.
    """
    shape, width, n = model.shape, model.width, model.trainable
    layer, again = saved_bytes(shape, width), 0
    if micro.recompute:
        layer, again = width * shape.hidden, layer
    kept = micro.tokens * micro.graphs * (layer * shape.layers + again + 2 * FLOAT * shape.hidden)
    activations = Part(
        "activations of a micro-batch",
        kept,
        f"{micro.tokens:,} tokens × {shape.layers} layers × {layer:,} bytes"
        + (f", {again:,} of one" if again else "")
        + (f" × {micro.graphs} graphs" if micro.graphs > 1 else ""),
        "update",
    )
    gradients = Part("gradients", FLOAT * n, f"{n:,} trainable × 4 bytes", "update")
    parts = [max(activations, gradients, key=lambda p: p.bytes)] if micro.first else [gradients, activations]
    if micro.block:
        masks = micro.block * micro.tokens * width * shape.layers
        basis = f"{micro.block:,} × {micro.tokens:,} places × {shape.layers} layers × {width} bytes"
        parts.append(Part("masks of shared prefixes", masks, basis, "update"))
    if micro.head != "none":
        parts.append(_head(shape, width, micro))
    return parts


def _head(shape: Shape, width: int, micro: Micro) -> Part:
    """Two blocks of logits; slopes for the backward pass, or logits again there; the gradient they make."""
    tokens, vocabulary, hidden = micro.tokens, shape.vocabulary, shape.hidden
    chunk = CHUNK * vocabulary
    block = min(tokens * BLOCK, chunk)
    size, basis = 2 * FLOAT * block, f"2 × {block:,} logits × 4 bytes"
    if micro.head == "frozen":
        size += width * (chunk + tokens * hidden)
        basis += ", slopes of a chunk, states' gradient"
    elif tokens * vocabulary * width <= KEPT:
        size += width * tokens * vocabulary
        basis += f", slopes {tokens:,} × {vocabulary:,} × {width} bytes"
        if width == FLOAT:  # in half precision it goes to the masters' by blocks
            size += FLOAT * vocabulary * hidden
            basis += ", the head's gradient"
    else:
        size = 2 * FLOAT * chunk + FLOAT * vocabulary * hidden
        basis = f"2 × {CHUNK} × {vocabulary:,} logits × 4 bytes, the head's gradient"
    return Part("log-probabilities", size, basis, "update")


def slack_part(parts: Sequence[Part], *, adapter: bool) -> Part:
    """What the C allocator does not give back, from the parts that come and go in an update."""
    share = ADAPTER_SLACK if adapter else SLACK
    moving = sum(p.bytes for p in parts if p.phase == "update")
    return Part("allocator's slack", share * moving, f"{share:.0%} of what is held in an update", "update")


def engine_parts(shape: Shape, width: int, *, rows: int, length: int, packed: bool, copy: bool) -> list[Part]:
    """What samples: its cache at full rows and length, its own layout of the weights, or a copy of them."""
    values = shape.kv_values
    parts = [
        Part(
            "key/value cache",
            rows * length * values * width,
            f"{rows} rows × {length:,} tokens × {values:,} values × {width} bytes",
        )
    ]
    if packed:
        basis = f"{shape.matrices:,} parameters in matrices × {width} bytes"
        parts.append(Part("engine's weights", shape.matrices * width, basis))
    elif copy:
        parts.append(weights_part("engine's weights", shape, width))
    logits = 2 * FLOAT * rows * shape.vocabulary
    parts.append(Part("sampling", logits, f"2 × {rows} rows × {shape.vocabulary:,} logits × 4 bytes", "play"))
    return parts


def peak(parts: Sequence[Part]) -> float:
    """Bytes at the fullest moment: what is always there, and the larger of the two phases."""
    always, update, play = (
        sum(p.bytes for p in parts if p.phase == phase) for phase in ("always", "update", "play")
    )
    return always + max(update, play)
