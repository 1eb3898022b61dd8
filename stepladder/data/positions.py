"""How long a sequence the model was made for."""

from __future__ import annotations

from typing import Any


def max_positions(model: Any) -> int | None:
    """Tokens that the model's config has positions for; None where it names no limit."""
    config = model.config.get_text_config()
    found: int | None = getattr(config, "max_position_embeddings", None) or getattr(
        config, "n_positions", None
    )
    return found
