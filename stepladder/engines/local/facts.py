"""Numbers of the local engine that a plan needs, apart from the engine."""

from __future__ import annotations

MAX_ROWS = 128
"""Sequences that are decoded together."""
FUSABLE = frozenset({"llama", "qwen2", "qwen3"})
"""Architectures that the fused path serves, by `model_type`."""
