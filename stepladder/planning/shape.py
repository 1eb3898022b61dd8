"""The sizes of a model from its config.json, and what follows from them by arithmetic. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepladder.errors import ConfigError

# Families whose parameters are counted exactly; others are taken for Llama-like ones, and the plan says so.
KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer. `positions`: rows of a learnt table of positions (GPT-2), else 0.

    `gated`: an MLP of three matrices (SwiGLU) rather than two. `experts` above 1: a mixture, of which
    `active` work on a token.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    gated: bool = True
    positions: int = 0
    qkv_bias: bool = False
    head_norms: bool = False
    norms: int = 2  # of length `hidden`, a layer
    experts: int = 1
    active: int = 1

    @property
    def known(self) -> bool:
        """Are the counts exact for this family?"""
        return self.family in KNOWN and self.experts == 1

    @property
    def embedding(self) -> int:
        """Parameters of the input embeddings."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def output(self) -> int:
        """Parameters of an output layer of its own; 0 where it is the input embedding (tied)."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Parameters of all layers' matrices: what multiplies each token, experts included."""
        return self.layers * (self._attention + self.experts * self._mlp + self._router)

    @property
    def active_matrices(self) -> int:
        """Those of them that a token meets."""
        return self.layers * (self._attention + self.active * self._mlp + self._router)

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        vectors = self.layers * (self.norms * self._norm + self._biases) + self._norm
        if self.head_norms:
            vectors += self.layers * 2 * self.head_dim
        return self.embedding + self.output + self.matrices + vectors

    @property
    def kv_values(self) -> int:
        """Numbers of the key/value cache a token: 2 · layers · kv_heads · head_dim."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def _attention(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def _mlp(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def _norm(self) -> int:
        return 2 * self.hidden if self.family == "gpt2" else self.hidden  # a LayerNorm has a bias too

    @property
    def _biases(self) -> int:
        if self.family == "gpt2":  # of all four matrices
            return 3 * self.hidden + self.hidden + self.intermediate + self.hidden
        return (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json states. Raises ConfigError where a size is missing.

    >>> shape_of({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...           "intermediate_size": 16, "vocab_size": 10, "tie_word_embeddings": True}).parameters
    1400
    """
    config = config.get("text_config") or config
    family = str(config.get("model_type", "unknown"))
    if family == "gpt2":
        hidden, heads = _size(config, "n_embd"), _size(config, "n_head")
        return Shape(
            family=family,
            layers=_size(config, "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=config.get("n_inner") or 4 * hidden,
            vocabulary=_size(config, "vocab_size"),
            tied=True,
            gated=False,
            positions=_size(config, "n_positions"),
        )
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    return Shape(
        family=family,
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=(experts > 1 and config.get("moe_intermediate_size"))
        or _size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        # transformers' own default differs: of these families only Gemma's is to tie
        tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
        qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
        head_norms=family.startswith(("qwen3", "gemma3")),
        norms=4 if family.startswith(("gemma2", "gemma3")) else 2,
        experts=int(experts),
        active=int(config.get("num_experts_per_tok") or 1),
    )


def lora_parameters(shape: Shape, rank: int, targets: tuple[str, ...] | str) -> int:
    """Of an adapter on the named projections (or all of a layer's): rank · (inputs + outputs) each."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (shape.hidden, query),
        "k_proj": (shape.hidden, kv),
        "v_proj": (shape.hidden, kv),
        "o_proj": (query, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    chosen = sizes if isinstance(targets, str) else {name: sizes[name] for name in targets if name in sizes}
    return shape.layers * rank * sum(a + b for a, b in chosen.values())


def saved_bytes(shape: Shape, width: int) -> int:
    """Bytes a token that one layer keeps for its backward pass, in a type of `width` bytes.

    Counted from what autograd saves of a Llama layer, all in the compute type: six vectors of the hidden size
    (inputs of norms and projections, queries, the attention's result), keys and values once a key/value head,
    and two of the MLP. A norm of the heads keeps their inputs in float32 and once more.
    """
    heads = shape.heads * shape.head_dim
    norms = 4 * width * shape.hidden
    attention = 2 * width * (heads + shape.kv_heads * shape.head_dim)
    if shape.head_norms:
        attention += (4 + 2 * width) * (heads + shape.kv_heads * shape.head_dim)
    mlp = 2 * width * shape.intermediate * shape.active
    return norms + attention + mlp


def forward_flops(shape: Shape, context: float, *, head: bool = True) -> float:
    """Floating-point operations of a token that sees `context` others: two for each weight it meets."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * context
    return 2 * shape.active_matrices + attention + (2 * shape.vocabulary * shape.hidden if head else 0)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"config.json states no usable {key!r} (got {value!r}), so the model's size cannot be planned; "
            "a Hugging Face causal language model has one, such as hidden_size = 576"
        )
    return value
